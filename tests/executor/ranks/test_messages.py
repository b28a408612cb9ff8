"""What ranks are told, as bytes and back: batches of all kinds, and bytes that are no message."""

from dataclasses import replace

import numpy as np
import pytest

from executor_rig.plans import GREEDY, placement
from paceline_executor.errors import RankError
from paceline_executor.ranks.messages import Copy, Prepare, decode, encode
from paceline_executor.rows.rules import rules_of
from paceline_executor.runner.interface import NO_CELLS, NOTHING_DESCRIBED, PromptTargets, StepBatch
from paceline_executor.runner.measuring import prompt

RULED = replace(
    GREEDY,
    presence_penalty=0.5,
    frequency_penalty=-0.25,
    repetition_penalty=1.1,
    allowed_token_ids=(1, 2, 3),
    logit_bias=((3, 1.5), (4, -2.0)),
)


def int32(*values):
    return np.array(values, np.int32)


def placed(rules):
    """A prompt of four tokens with these rules."""
    batch = prompt(int32(5, 6, 7, 5), 2, row=3, end_token_ids=(2, 9))
    return replace(batch, described=replace(batch.described, rules=(rules,)))


def words(*bad_words, **more):
    return rules_of(replace(placement(0, [5, 6, 7, 5]), bad_word_token_ids=bad_words, **more))


DECODE = StepBatch(int32(0, 2), int32(1, 1), int32(9, 4), int32(0, 1), NOTHING_DESCRIBED, NO_CELLS)
TARGETS = PromptTargets(int32(0), int32(2), int32(3), int32(6, 7))
MESSAGES = {
    "preparing": Prepare(),
    "copies": Copy(int32(3, 1), int32(4, 7)),
    "decodes": DECODE,
    "drafts": replace(DECODE, num_drafts=int32(4, 0), min_draft_chance=0.25, draft_spare_ns=7),
    "no row with drafts": replace(DECODE, sampled=int32(), num_drafts=int32()),
    "a prompt": placed(None),
    "targets": replace(placed(None), prompt_targets=TARGETS),
    "rules": placed(words((8,), (1, 2), (1, 3), (4, 5, 6), sampling=RULED, min_tokens=3, end_token_ids=(2,))),
    "a bad word": placed(words((1, 2))),
}


def plain(value):
    """What compares: arrays as lists with their types."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tolist()
    if isinstance(value, tuple):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if hasattr(value, "__dataclass_fields__"):
        return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return value


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_comes_as_it_was_sent(message):
    sent = MESSAGES[message]
    assert plain(decode(bytearray(encode(sent)))) == plain(sent)


@pytest.mark.parametrize("message", MESSAGES)
def test_bytes_that_are_no_message_are_refused(message):
    """Cut short, longer, of values that nobody knows."""
    sound = encode(MESSAGES[message])
    for data in (sound + bytes(8), sound[:-8], sound[:7], word_changed(sound, 0, 1 << 40), word_changed(sound, 1, 7)):
        with pytest.raises(RankError, match="no message"):
            decode(bytearray(data))
    for value in ((), 5, np.zeros(3, np.int32)):
        with pytest.raises(RankError, match=f"a {type(value).__name__}"):
            decode(bytearray(encode(value)))


def test_no_spoilt_word_does_harm():
    """Sizes of arrays, lengths, kinds: it is refused, or means something else, of what came."""
    sound = encode(MESSAGES["rules"])
    num_words, num_refused = int.from_bytes(sound[:8], "little"), 0
    for place in range(1 + num_words):
        for wrong in (-1, 0, 3, 9, 17, 1 << 40, -(1 << 63)):
            try:
                decode(bytearray(word_changed(sound, place, wrong)))
            except RankError:
                num_refused += 1
    assert num_refused > 2 * num_words


def word_changed(data, place, word):
    return data[: 8 * place] + word.to_bytes(8, "little", signed=True) + data[8 * place + 8 :]

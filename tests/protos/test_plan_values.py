"""The values of the plan protocol: numbers of enums, columns of log-probabilities, claims, ranges of versions."""

import numpy as np
import pytest

from paceline.plan.values import (
    NO_COPIES,
    NO_KEY,
    NO_TAGS,
    BlockCopies,
    BlockTags,
    Claim,
    FinalRelease,
    FinishReason,
    GenerationDefaults,
    LogprobColumns,
    RecordId,
    RowFinish,
    RowState,
    TokenLogprobs,
    joined,
)
from paceline.plan.versions import ProtocolRange
from paceline.v1 import plan_pb2, sampling_pb2

NO_TOKENS = np.zeros(0, dtype=np.int32)


def column(*values):
    return np.array(values, dtype=np.int32)


def logprobs(offset, num_tokens):
    """Recognisable log-probabilities of tokens `offset` and following, with two alternatives each."""
    places = np.arange(offset, offset + num_tokens)
    tops = np.stack([2 * places, 2 * places + 1], axis=1)
    return LogprobColumns(offset, -places.astype(np.float32), tops.astype(np.int32), -tops.astype(np.float32))


def row_state(num_output, of_output=None):
    """A row with an output of so many tokens and these log-probabilities."""
    tokens = np.zeros(num_output, dtype=np.int32)
    return RowState(RecordId("", "r"), 0, 1, NO_TOKENS, tokens, 0, NO_TOKENS, logprobs=of_output)


@pytest.mark.parametrize(
    ("ours", "protos"), [(RowFinish, plan_pb2.RowFinish), (FinishReason, sampling_pb2.FinishReason)]
)
def test_enums_have_the_numbers_of_the_protos(ours, protos):
    names = {value: name for name, value in protos.items()}
    assert [value.value for value in ours] == sorted(names)
    for value in ours:
        assert value.value == 0 or names[value.value].endswith(value.name)


def test_logprobs_of_some_tokens_are_found_by_their_place_in_the_output():
    assert logprobs(3, 4).of(4, column(70, 71)) == (
        TokenLogprobs(70, -4.0, ((8, -8.0), (9, -9.0))),
        TokenLogprobs(71, -5.0, ((10, -10.0), (11, -11.0))),
    )


def test_logprobs_that_are_split_can_be_joined_again():
    """A request longer than a part of a snapshot goes on in the next one."""
    head, rest = logprobs(3, 5).split(2)
    assert (head.offset, head.end, rest.offset, rest.end) == (3, 5, 5, 8)
    whole = joined([head, rest])
    assert (whole.offset, whole.num_tokens, whole.num_top) == (3, 5, 2)
    assert whole.of(3, np.zeros(5, np.int32)) == logprobs(3, 5).of(3, np.zeros(5, np.int32))
    assert logprobs(3, 2).split(9)[1].num_tokens == 0


def test_logprobs_are_cut_with_the_output():
    cut = logprobs(3, 5).up_to(6)
    assert (cut.offset, cut.end) == (3, 6)
    assert (logprobs(3, 5).up_to(2).offset, logprobs(3, 5).up_to(2).num_tokens) == (2, 0)


def test_logprobs_say_what_they_take():
    assert (logprobs(0, 5).bytes_per_token, logprobs(0, 5).nbytes) == (20, 100)


def test_a_row_knows_from_where_on_it_has_logprobs():
    assert row_state(8, logprobs(3, 5)).has_logprobs_from(3)
    assert not row_state(8, logprobs(3, 5)).has_logprobs_from(2)
    assert not row_state(9, logprobs(3, 5)).has_logprobs_from(3)
    assert not row_state(8).has_logprobs_from(3)
    assert row_state(8).has_logprobs_from(8)


def test_copies_and_tags_are_made_of_pairs_and_give_them_back():
    copies, tags = BlockCopies.of([(1, 2), (3, 4)]), BlockTags.of([(7, b"a" * 16), (8, NO_KEY)])
    assert (copies.sources.tolist(), copies.destinations.tolist()) == ([1, 3], [2, 4])
    assert (tags.block_ids.tolist(), tags.keys) == ([7, 8], b"a" * 16 + bytes(16))
    assert (list(copies), list(tags)) == ([(1, 2), (3, 4)], [(7, b"a" * 16), (8, NO_KEY)])
    assert BlockCopies.of([]) is NO_COPIES
    assert BlockTags.of([]) is NO_TAGS


def test_claims_compare_by_term_then_by_who_asks():
    assert Claim(2, "a") > Claim(1, "b") > Claim(1, "a")
    assert Claim(1, "a", "host:1") == Claim(1, "a", "host:2")


@pytest.mark.parametrize(
    ("ours", "theirs", "version"),
    [((1, 2), (2, 5), 2), ((1, 4), (2, 3), 3), ((3, 4), (1, 2), None), ((1, 2), (2, 1), None)],
)
def test_the_highest_version_that_both_speak_is_picked(ours, theirs, version):
    assert ProtocolRange(*ours).highest_in_common(ProtocolRange(*theirs)) == version
    assert ProtocolRange(*theirs).highest_in_common(ProtocolRange(*ours)) == version


@pytest.mark.parametrize(
    ("field", "least", "most", "beyond"),
    [
        ("temperature", 0, 100, (-0.1, 100.1, float("nan"))),
        ("top_p", 0.001, 1, (0, 1.1, float("nan"))),
        ("top_k", 0, 2**31 - 1, (-1, 2**31)),
        ("min_p", 0, 1, (-0.1, 1.1, float("nan"))),
        ("repetition_penalty", 0.001, 10, (0, 10.1, float("nan"))),
    ],
)
def test_generation_defaults_are_values_that_can_be_sampled_with(field, least, most, beyond):
    """One that cannot is refused by its name."""
    for value in (least, most):
        assert getattr(GenerationDefaults(**{field: value}), field) == value
    for value in beyond:
        with pytest.raises(ValueError, match=field):
            GenerationDefaults(**{field: value})


def test_an_open_record_is_one_that_waits_for_a_row():
    ended = FinalRelease(1, FinishReason.STOP)
    record = RowState(RecordId("", "r"), None, 1, NO_TOKENS, NO_TOKENS, 0, NO_TOKENS)
    done = RowState(RecordId("", "r"), None, 1, NO_TOKENS, NO_TOKENS, 0, NO_TOKENS, released=ended)
    assert (record.is_open_record, done.is_open_record, row_state(1).is_open_record) == (True, False, False)

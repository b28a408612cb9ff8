"""A request's rules: masks, biases and penalties. What they come to at a token is known to `runner.rule_columns`.

A pure function of the placement: a row that is placed again goes on as it was.
"""

import numpy as np

from paceline.plan.values import NewRequest
from paceline_executor.runner.interface import Int32Array
from paceline_executor.runner.row_rules import NO_TOKENS, RowRules


def rules_of(placement: NewRequest) -> RowRules | None:
    """None if the checked placement has none."""
    sampling = placement.sampling
    words: dict[tuple[int, ...], list[int]] = {}
    for word in placement.bad_word_token_ids:
        if len(word) > 1:
            words.setdefault(word[:-1], []).append(word[-1])
    # A prompt does not change, and how often a token is in it does not count.
    is_prompt_penalised = sampling.repetition_penalty != 1
    rules = RowRules(
        allowed=np.array(sampling.allowed_token_ids, dtype=np.int32),
        biased=np.array([token_id for token_id, _ in sampling.logit_bias], dtype=np.int32),
        biases=np.array([bias for _, bias in sampling.logit_bias], dtype=np.float32),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        forbidden=np.array([word[0] for word in placement.bad_word_token_ids if len(word) == 1], dtype=np.int32),
        bad_words={before: np.array(last, dtype=np.int32) for before, last in words.items()},
        bad_word_lens=tuple(sorted({len(before) for before in words})),
        min_tokens=0 if placement.structured else placement.min_tokens,  # the form knows what else there is
        end_token_ids=np.array(placement.end_token_ids + placement.ignored_end_token_ids, dtype=np.int32),
        prompt=_each_once(placement.prompt_token_ids) if is_prompt_penalised else NO_TOKENS,
    )
    return rules if rules.is_permanent or rules.min_tokens else None


def _each_once(token_ids: Int32Array) -> Int32Array:
    """Sorted. numpy's `unique` takes ten times as long."""
    is_there = np.zeros(int(token_ids.max(initial=0)) + 1, dtype=np.bool_)
    is_there[token_ids] = True
    return np.flatnonzero(is_there).astype(np.int32)

"""What a request's rules come to at its next token: masks, biases and penalties.

A pure function of the placement and of the tokens since: a row that is placed again with its output goes on as it was.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.plan.values import NewRequest
from paceline_executor.runner.interface import Float32Array, Int32Array, LogitRuleColumns, TokenLists
from paceline_executor.runner.row_rules import NO_TOKENS, RowRules

_NO_BIASES: Float32Array = np.zeros(0, dtype=np.float32)


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
        min_tokens=placement.min_tokens,
        end_token_ids=np.array(placement.end_token_ids + placement.ignored_end_token_ids, dtype=np.int32),
        prompt=_each_once(placement.prompt_token_ids) if is_prompt_penalised else NO_TOKENS,
    )
    return rules if rules.is_permanent or rules.min_tokens else None


@dataclass(frozen=True, slots=True)
class Ruled:
    rules: RowRules
    output: Int32Array

    @property
    def is_ruled_now(self) -> bool:
        is_withheld = self.output.size < self.rules.min_tokens and self.rules.end_token_ids.size > 0
        return self.rules.is_permanent or is_withheld


def rule_columns(rows: Sequence[Ruled | None]) -> LogitRuleColumns | None:
    """At the next token; None if no row has any now."""
    present = [mine if mine is not None and mine.is_ruled_now else None for mine in rows]
    if not any(present):
        return None
    one: Float32Array = np.ones(len(rows), dtype=np.float32)
    presence, frequency, repetition = one * 0, one * 0, one
    allowed, forbidden, biased, prompt, output = ([NO_TOKENS] * len(rows) for _ in range(5))
    biases = [_NO_BIASES] * len(rows)
    for index, mine in enumerate(present):
        if mine is None:
            continue
        rules = mine.rules
        allowed[index], biased[index], biases[index] = rules.allowed, rules.biased, rules.biases
        forbidden[index] = rules.forbidden_after(mine.output)
        presence[index], frequency[index] = rules.presence_penalty, rules.frequency_penalty
        repetition[index] = rules.repetition_penalty
        output[index] = mine.output if rules.has_penalties else NO_TOKENS
        prompt[index] = rules.prompt
    return LogitRuleColumns(
        allowed=TokenLists.of(allowed),
        forbidden=TokenLists.of(forbidden),
        biased=TokenLists.of(biased),
        biases=np.concatenate(biases),
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        prompt=TokenLists.of(prompt),
        output=TokenLists.of(output),
    )


def _each_once(token_ids: Int32Array) -> Int32Array:
    """Sorted. numpy's `unique` takes ten times as long."""
    is_there = np.zeros(int(token_ids.max(initial=0)) + 1, dtype=np.bool_)
    is_there[token_ids] = True
    return np.flatnonzero(is_there).astype(np.int32)

"""What a request's rules come to at its next token: which tokens are masked, which biases and penalties apply.

A pure function of the placement and of the tokens since: a row that is placed again with its output goes on as it was.
Knows tokens; the arithmetic is the runner's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.plan.values import NewRequest
from paceline_executor.rows.columns import RowColumns
from paceline_executor.runner.interface import Float32Array, Int32Array, LogitRuleColumns, TokenLists

_NONE: Int32Array = np.zeros(0, dtype=np.int32)
_NO_BIASES: Float32Array = np.zeros(0, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class RowRules:
    """The rules of one row, made ready once."""

    allowed: Int32Array
    biased: Int32Array
    biases: Float32Array  # [num_biased]
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    forbidden: Int32Array  # at every token: bad words of one token
    bad_words: Mapping[tuple[int, ...], Int32Array]  # longer ones: their last tokens, by the tokens before
    bad_word_lens: tuple[int, ...]  # of what is before the last token, each length once
    min_tokens: int
    end_token_ids: Int32Array  # forbidden before min_tokens
    prompt: Int32Array  # its tokens, each once, where they are penalised

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens count."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1

    @property
    def needs_output(self) -> bool:
        """Whether it counts which tokens were drawn, not only how many."""
        return self.has_penalties or bool(self.bad_words)

    @property
    def is_permanent(self) -> bool:
        """Whether it has more than min_tokens."""
        return bool(
            self.allowed.size or self.biased.size or self.forbidden.size or self.bad_words or self.has_penalties
        )

    def forbidden_after(self, output: Int32Array) -> Int32Array:
        """The tokens that cannot follow this output."""
        parts = [self.forbidden]
        if output.size < self.min_tokens:
            parts.append(self.end_token_ids)
        if self.bad_words:
            tail = tuple(output[-self.bad_word_lens[-1] :].tolist())
            parts += [self.bad_words.get(tail[-size:], _NONE) for size in self.bad_word_lens if size <= len(tail)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def rules_of(placement: NewRequest) -> RowRules | None:
    """The rules of a checked placement; None if it has none."""
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
        prompt=_each_once(placement.prompt_token_ids) if is_prompt_penalised else _NONE,
    )
    return rules if rules.is_permanent or rules.min_tokens else None


def rule_columns(rules: Mapping[int, RowRules], columns: RowColumns, rows: Int32Array) -> LogitRuleColumns | None:
    """The rules of these rows at their next token, or None if none has any now."""
    if not rules:
        return None
    present = [_present(rules.get(row), columns, row) for row in rows.tolist()]
    if not any(present):
        return None
    one: Float32Array = np.ones(rows.size, dtype=np.float32)
    presence, frequency, repetition = one * 0, one * 0, one
    allowed, forbidden, biased, prompt, output = ([_NONE] * rows.size for _ in range(5))
    biases = [_NO_BIASES] * rows.size
    for index, (row, mine) in enumerate(zip(rows.tolist(), present, strict=True)):
        if mine is None:
            continue
        # Where this is a bound, only its length counts: rules of rows that ask for more wait until it is known.
        drawn = columns.tokens[row, columns.num_prompt[row] : columns.known_bound[row]]
        allowed[index], biased[index], biases[index] = mine.allowed, mine.biased, mine.biases
        forbidden[index] = mine.forbidden_after(drawn)
        presence[index], frequency[index] = mine.presence_penalty, mine.frequency_penalty
        repetition[index] = mine.repetition_penalty
        output[index] = drawn if mine.has_penalties else _NONE
        prompt[index] = mine.prompt
    return LogitRuleColumns(
        allowed=_lists(allowed),
        forbidden=_lists(forbidden),
        biased=_lists(biased),
        biases=np.concatenate(biases),
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        prompt=_lists(prompt),
        output=_lists(output),
    )


def _present(rules: RowRules | None, columns: RowColumns, row: int) -> RowRules | None:
    """The rules of a row if they ask for anything at its next token."""
    if rules is None or rules.is_permanent:
        return rules
    num_output = int(columns.known_bound[row] - columns.num_prompt[row])
    return rules if num_output < rules.min_tokens and rules.end_token_ids.size else None


def _each_once(token_ids: Int32Array) -> Int32Array:
    """The sorted distinct tokens. numpy's `unique` takes ten times as long."""
    is_there = np.zeros(int(token_ids.max(initial=0)) + 1, dtype=np.bool_)
    is_there[token_ids] = True
    return np.flatnonzero(is_there).astype(np.int32)


def _lists(rows: Sequence[Int32Array]) -> TokenLists:
    cu_lens = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([row.size for row in rows], out=cu_lens[1:])
    return TokenLists(cu_lens, np.concatenate(rows))

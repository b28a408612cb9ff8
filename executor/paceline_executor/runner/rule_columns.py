"""What rows' rules come to at their next tokens, on a host: a function of rules and output."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline_executor.runner.interface import Float32Array, HostTokenLists, Int32Array, LogitRuleColumns
from paceline_executor.runner.row_rules import NO_TOKENS, RowRules

_NO_BIASES: Float32Array = np.zeros(0, dtype=np.float32)


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
        allowed=HostTokenLists.of(allowed),
        forbidden=HostTokenLists.of(forbidden),
        biased=HostTokenLists.of(biased),
        biases=np.concatenate(biases),
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        prompt=HostTokenLists.of(prompt),
        output=HostTokenLists.of(output),
    )

"""Drafts for rows whose tokens are hashes: some right ones, and wrong ones behind them.

Apart from the device, because it knows how tokens are drawn and refuses to know slots.
"""

from collections.abc import Callable

from drafting.drafters import row_of
from executor_rig.hash_runner import HashRule
from executor_rig.plans import int32
from paceline_executor.runner.interface import Int32Array
from paceline_executor.runner.simulated import SimulatedRunner

KeyOf = Callable[[Int32Array], tuple[int, int]]
"""Of the row whose tokens these are, a view of the runner's own: its seed, and how long its prompt is."""


def keys_in(runner: SimulatedRunner) -> KeyOf:
    def key_of(token_ids: Int32Array) -> tuple[int, int]:
        rows = runner._rows
        row = row_of(token_ids, rows._tokens)
        return int(rows._sampling["seeds"][row]), int(rows._num_prompt[row])

    return key_of


class HashDrafter:
    """`num_right` says how many drafts are right, of so many. Those of a row with rules may all be wrong."""

    def __init__(self, rule: HashRule, num_right: Callable[[int], int], key_of: KeyOf) -> None:
        self._rule = rule
        self._num_right = num_right
        self._key_of = key_of

    def draft(self, token_ids: Int32Array, num_wanted: int, min_chance: float) -> Int32Array:  # noqa: ARG002
        (seed, num_prompt), tokens = self._key_of(token_ids), token_ids.tolist()
        num_right = self._num_right(num_wanted)
        for num_before in range(num_wanted):
            token_id = self._rule.next_token(tokens, seed, len(tokens) - num_prompt)
            tokens.append(token_id if num_before < num_right else (token_id + 1) % self._rule.vocab_size)
        return int32(tokens[token_ids.size :])

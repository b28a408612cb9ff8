"""Drafts for rows whose tokens are hashes: some right ones, and wrong ones behind them.

Apart from the device, because it knows how tokens are drawn and refuses to know slots.
"""

from collections.abc import Callable, Sequence

from paceline_executor.runner.drafter import WantedDrafts
from paceline_executor.runner.interface import Int32Array
from paceline_executor.testing.hash_runner import HashRule
from paceline_executor.testing.plans import int32


class HashDrafter:
    """`num_right` says how many drafts are right, of so many. Those of a row with rules may all be wrong."""

    def __init__(self, rule: HashRule, num_right: Callable[[int], int]) -> None:
        self._rule = rule
        self._num_right = num_right

    def draft(self, wanted: WantedDrafts) -> Sequence[Int32Array]:
        seeds, offsets = wanted.sampling.seeds.tolist(), wanted.sampling.offsets.tolist()
        drafts: list[Int32Array] = []
        for row, seed, offset in zip(wanted.rows, seeds, offsets, strict=True):
            tokens, num_known = row.token_ids.tolist(), row.token_ids.size
            num_right = self._num_right(row.num_wanted)
            for number in range(row.num_wanted):
                token_id = self._rule.next_token(tokens, seed, offset + number)
                tokens.append(token_id if number < num_right else (token_id + 1) % self._rule.vocab_size)
            drafts.append(int32(tokens[num_known:]))
        return drafts

    def forget(self, row: int) -> None:
        """See Drafter."""

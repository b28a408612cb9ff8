"""Drafters for tests: one that errs as often as wanted, and one of no use."""

from collections.abc import Callable, Sequence
from random import Random

import numpy as np

from executor_rig.plans import int32
from paceline_executor.runner.interface import Int32Array


def row_of(token_ids: Int32Array, tokens: Int32Array) -> int:
    """Of which row they are a view. tokens: [num_rows, max_tokens]."""
    return next(row for row, mine in enumerate(tokens) if np.may_share_memory(mine, token_ids))


class KnowingDrafter:
    """`answers` are prompts with outputs. num_right: how many drafts are right, of so many."""

    def __init__(self, answers: Sequence[Sequence[int]], num_right: Callable[[int], int]) -> None:
        self._answers = [list(answer) for answer in answers]
        self._num_right = num_right

    def draft(self, token_ids: Int32Array, num_wanted: int, min_chance: float) -> Int32Array:  # noqa: ARG002
        known = token_ids.tolist()
        answer = next((answer for answer in self._answers if answer[: len(known)] == known), known)
        right = answer[len(known) :][: self._num_right(num_wanted)]
        following = answer[len(known) + len(right)] if len(known) + len(right) < len(answer) else 0
        return int32(right + [following + 1] * (num_wanted - len(right)))


class UselessDrafter:
    """The same token again and again, more than wanted, or no token."""

    def __init__(self, random: Random, vocab_size: int) -> None:
        self._random = random
        self._answers = [[0] * 20, [vocab_size - 1] * 3, [], [1, vocab_size, 2], [-1], [3, 2**31 - 1]]

    def draft(self, token_ids: Int32Array, num_wanted: int, min_chance: float) -> Int32Array:  # noqa: ARG002
        return np.array(self._random.choice(self._answers), dtype=np.int32)

"""The seam between rows of a host and whoever drafts for them; prompt lookup behind it.

"Prompt lookup decoding", Saxena, 2023, https://github.com/apoorvumang/prompt-lookup-decoding, as
`paceline_kernels.prompt_lookup` defines it, without tensors.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from paceline_executor.runner.interface import Int32Array
from paceline_executor.runner.row_rules import NO_TOKENS

MAX_NUM_DRAFT_TOKENS = 8
"""Of a row and step; MEASURED.md says why."""

_MIN_MATCH, _MAX_MATCH = 2, 16  # tokens


class Drafter(Protocol):
    def draft(self, token_ids: Int32Array, num_wanted: int, min_chance: float) -> Int32Array:
        """A guess how a row goes on, or none. token_ids: all it has. What is impossible is dropped; what is less likely
        than `min_chance` does not pay.
        """
        ...


class NoDrafter:
    """See Drafter."""

    def draft(self, token_ids: Int32Array, num_wanted: int, min_chance: float) -> Int32Array:  # noqa: ARG002
        return NO_TOKENS


class PromptLookup:
    """See Drafter. What followed the last tokens where they stood before, the latest of the longest matches."""

    def draft(self, token_ids: Int32Array, num_wanted: int, min_chance: float) -> Int32Array:
        last = token_ids.size - 1
        is_pair = (token_ids[1:last] == token_ids[last]) & (token_ids[: last - 1] == token_ids[last - 1])
        ends = np.flatnonzero(is_pair) + 1
        if last < _MIN_MATCH or not ends.size:
            return NO_TOKENS
        length = _MIN_MATCH
        while length < _MAX_MATCH:
            longer = ends[(ends >= length) & (token_ids[ends - length] == token_ids[last - length])]
            if not longer.size:
                break
            ends, length = longer, length + 1
        chances = np.cumprod(1 - 1 / np.minimum(length + np.arange(num_wanted), _MAX_MATCH))
        num_drafts, place = int((chances >= min_chance).sum()), int(ends[-1])
        drafts: Int32Array = token_ids[place + 1 + np.arange(num_drafts) % (last - place)]  # what repeats goes on
        return drafts


class TimedDrafter:
    def __init__(self, inner: Drafter, clock_ns: Callable[[], int]) -> None:
        self._inner = inner
        self._clock_ns = clock_ns
        self._spent_ns = 0

    def draft(self, token_ids: Int32Array, num_wanted: int, min_chance: float) -> Int32Array:
        start_ns = self._clock_ns()
        drafts = self._inner.draft(token_ids, num_wanted, min_chance)
        self._spent_ns += self._clock_ns() - start_ns
        return drafts

    def take_ns(self) -> int:
        """Since it was asked last."""
        spent_ns, self._spent_ns = self._spent_ns, 0
        return spent_ns

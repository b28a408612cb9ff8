"""The seam between rows and whoever guesses how they go on. Knows rows by number, and tokens; no drafter."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline_executor.runner.interface import Int32Array

MAX_NUM_DRAFT_TOKENS = 8
"""Of a row and step, where a drafter reads tokens alone; see MEASURED.md for what more would cost and bring."""


@dataclass(frozen=True, slots=True)
class WantedDrafts:
    """How many drafts a row may have at most, at least 1. token_ids: all it knows; they may change after the call."""

    row: int
    token_ids: Int32Array
    num_wanted: int


class Drafter(Protocol):
    """Guesses tokens. What it keeps of a row is its own, and lasts until `forget`."""

    def draft(self, wanted: Sequence[WantedDrafts]) -> Sequence[Int32Array]:
        """Drafts for each row, in this order; none where it has no guess. Too many or impossible ones are dropped.

        The known tokens of a row only grow until it is forgotten.
        """
        ...

    def forget(self, row: int) -> None:
        """The next tokens on this row are another request's."""
        ...


class TimedDrafter:
    """A drafter, and how long it took."""

    def __init__(self, inner: Drafter, clock_ns: Callable[[], int]) -> None:
        self._inner = inner
        self._clock_ns = clock_ns
        self._spent_ns = 0

    def draft(self, wanted: Sequence[WantedDrafts]) -> Sequence[Int32Array]:
        start_ns = self._clock_ns()
        try:
            return self._inner.draft(wanted)
        finally:
            self._spent_ns += self._clock_ns() - start_ns

    def forget(self, row: int) -> None:
        self._inner.forget(row)

    def take_ns(self) -> int:
        """The time since it was asked last."""
        spent_ns, self._spent_ns = self._spent_ns, 0
        return spent_ns

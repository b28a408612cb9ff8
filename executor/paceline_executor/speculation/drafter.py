"""The seam between rows and drafters. Knows rows by number, and tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline_executor.profiling.profiler import Profiler
from paceline_executor.runner.interface import Int32Array

MAX_NUM_DRAFT_TOKENS = 8
"""Of a row and step; MEASURED.md says why."""


@dataclass(frozen=True, slots=True)
class WantedDrafts:
    """token_ids: all known ones; they may change after the call."""

    row: int
    token_ids: Int32Array
    num_wanted: int  # at most, and at least 1


class Drafter(Protocol):
    """Until a row is forgotten, its known tokens only grow."""

    def draft(self, wanted: Sequence[WantedDrafts]) -> Sequence[Int32Array]:
        """A guess, or none, for each row in this order. What is impossible is dropped."""
        ...

    def forget(self, row: int) -> None:
        """Its next tokens are another request's."""
        ...


class TimedDrafter:
    def __init__(self, inner: Drafter, clock_ns: Callable[[], int], profiler: Profiler) -> None:
        self._inner = inner
        self._clock_ns = clock_ns
        self._profiler = profiler
        self._spent_ns = 0

    def draft(self, wanted: Sequence[WantedDrafts]) -> Sequence[Int32Array]:
        start_ns = self._clock_ns()
        try:
            with self._profiler.span("draft"):
                return self._inner.draft(wanted)
        finally:
            self._spent_ns += self._clock_ns() - start_ns

    def forget(self, row: int) -> None:
        self._inner.forget(row)

    def take_ns(self) -> int:
        """Since it was asked last."""
        spent_ns, self._spent_ns = self._spent_ns, 0
        return spent_ns

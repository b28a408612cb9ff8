"""Who is suspected of killing executors, or of making steps fail.

A suspect runs in steps of its own, ahead of all others, until it has got beyond where it was when things went wrong.
`Suspicion` goes with the request; `Suspects` stay with the executor. `recovery` carries out who fails.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from paceline_scheduler.core.executors import ExecutorDescription

MAX_EXECUTOR_DEATHS = 2
"""After so many in a row without progress, a request runs in steps of its own."""

MAX_LONE_FAILURES = 2
"""The first failure may have been the executor's doing."""


@dataclass(slots=True)
class Suspicion:
    num_executor_deaths: int = 0  # with it in their last step, without a new token between
    last_death_offset: int | None = None  # output tokens at the last of them
    failed_until: int = 0  # computed tokens; 0: no step failed since
    num_lone_failures: int = 0  # of steps with nothing else in them
    failed_at: str | None = None  # another executor tries it next

    def is_suspect(self, num_output_tokens: int) -> bool:
        return self.failed_until > 0 or self.is_lethal(num_output_tokens)

    def is_lethal(self, num_output_tokens: int) -> bool:
        """It has not exceeded the output it had when executors died."""
        return (
            self.num_executor_deaths >= MAX_EXECUTOR_DEATHS
            and self.last_death_offset is not None
            and num_output_tokens <= self.last_death_offset
        )

    def blame_death(self, num_output_tokens: int) -> None:
        has_progressed = self.last_death_offset is None or num_output_tokens > self.last_death_offset
        self.num_executor_deaths = 1 if has_progressed else self.num_executor_deaths + 1
        self.last_death_offset = num_output_tokens

    def clear_death(self) -> None:
        self.num_executor_deaths = max(0, self.num_executor_deaths - 1)

    def blame_lone_failure(self, address: str) -> bool:
        """Returns whether it has been tried often enough."""
        self.num_lone_failures += 1
        if self.num_lone_failures < MAX_LONE_FAILURES:
            self.failed_at = address
        return self.num_lone_failures >= MAX_LONE_FAILURES

    def note_progress(self) -> None:
        self.failed_until = self.num_lone_failures = 0
        self.failed_at = None

    def is_better_elsewhere(self, address: str) -> bool | None:
        """Returns None for no preference."""
        return None if self.failed_at is None else self.failed_at == address

    def quarantine_sentence(self) -> str:
        return (
            f"{self.num_executor_deaths} executors died while they ran it, the last one while it ran nothing else; it "
            "is not tried again"
        )


class Suspect(Protocol):
    suspicion: Suspicion

    @property
    def address(self) -> str | None: ...

    @property
    def num_output_tokens(self) -> int: ...

    @property
    def is_suspect(self) -> bool: ...


SuspectT = TypeVar("SuspectT", bound=Suspect)


@dataclass(frozen=True, slots=True)
class UnansweredStep(Generic[SuspectT]):
    """Keeps requests, not rows: what came of it may be told much later."""

    step_id: int
    positions: tuple[tuple[SuspectT, int], ...]  # planned up to and including this step
    is_lone: bool  # no other row ran


class Suspects(Generic[SuspectT]):
    def __init__(self) -> None:
        self.rows: set[int] = set()  # in steps of their own until they progress
        self.is_doubted = False  # a lone step failed, and none has succeeded since
        self.unanswered: tuple[UnansweredStep[SuspectT], ...] = ()
        self.blamed: tuple[SuspectT, ...] = ()  # of the lost executor's death

    def placed(self, row: int, request: Suspect) -> None:
        if request.is_suspect:
            self.rows.add(row)

    def left(self, row: int) -> None:
        self.rows.discard(row)

    def inherit(self, before: "Suspects[SuspectT]") -> None:
        self.is_doubted = before.is_doubted

    def note_progress(self, progress: Iterable[tuple[int, SuspectT, int, int]]) -> None:
        """Clears those that have passed where executors died or a step failed. `progress` gives row, request, computed
        and output tokens.
        """
        for row, request, num_computed, num_output in progress:
            if num_computed >= request.suspicion.failed_until:
                request.suspicion.note_progress()
                if not request.suspicion.is_lethal(num_output):
                    self.rows.discard(row)

    def died(
        self,
        before: "Suspects[SuspectT]",
        unanswered: tuple[UnansweredStep[SuspectT], ...],
        blamed: Sequence[SuspectT],
    ) -> None:
        self.unanswered, self.blamed = unanswered, tuple(blamed) or before.blamed

    def clear_blame(self) -> None:
        """The lost executor is back as the same process."""
        for request in self.blamed:
            request.suspicion.clear_death()


def blame_deaths(blamed: Sequence[SuspectT]) -> SuspectT | None:
    """Returns the one the death must be due to, if any. A suspect runs alone, so a request that had company was no
    suspect then.
    """
    is_sure = len(blamed) == 1 and blamed[0].suspicion.is_lethal(blamed[0].num_output_tokens)
    for request in blamed:
        request.suspicion.blame_death(request.num_output_tokens)
    return blamed[0] if is_sure else None


def blame_failed_step(
    unanswered: Iterable[UnansweredStep[SuspectT]], planned_by: ExecutorDescription, told_by: ExecutorDescription
) -> SuspectT | None:
    """Suspects the requests of a failed step; returns the one that was alone in it. `planned_by` is the executor when
    the steps were planned.
    """
    failed = told_by.failed_step
    if failed is None or (planned_by.incarnation, planned_by.epoch) != (told_by.incarnation, failed.epoch):
        return None  # not planned here, or blamed already
    step = next((step for step in unanswered if step.step_id == failed.step_id), None)
    if step is None:
        return None
    suspects = []
    for request, position in step.positions:
        if request.address in (None, told_by.address):  # else it runs elsewhere by now
            request.suspicion.failed_until = position
            suspects.append(request)
    return suspects[0] if suspects and step.is_lone else None


def in_order_of_trial(
    on_rows: Sequence[tuple[int, SuspectT]], queued: Sequence[SuspectT]
) -> Iterator[tuple[int | None, SuspectT]]:
    """Returns each once, with its row, before any twice."""
    for is_second_try in (False, True):
        yield from (pair for pair in on_rows if _was_tried(pair[1]) is is_second_try)
        first = next((request for request in queued if _was_tried(request) is is_second_try), None)
        if first is not None:
            yield None, first


def _was_tried(request: Suspect) -> bool:
    return request.suspicion.num_lone_failures > 0

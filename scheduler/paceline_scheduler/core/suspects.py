"""Who is suspected of killing executors, or of making steps fail: all that is held against requests, and its rules.

A suspect runs in steps of its own, ahead of all others, until it has got beyond where it was when things went wrong.
What is held against it goes with the request (`Suspicion`); what is remembered of an executor is in `Suspects`. Who
fails for it, and who is tried elsewhere, is carried out by `recovery`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from paceline_scheduler.core.executors import ExecutorDescription

MAX_EXECUTOR_DEATHS = 2
"""After so many in a row without getting on, a request runs in steps of its own."""

MAX_LONE_FAILURES = 2
"""So many steps of its own fail before a request does: the first failure may have been the executor's doing."""


@dataclass(slots=True)
class Suspicion:
    """What is held against one request."""

    num_executor_deaths: int = 0  # in whose last step it was, without a new token from one to the next
    last_death_offset: int | None = None  # how many output tokens it had at the last of them
    failed_until: int = 0  # so many tokens would be computed if no step with it had failed; 0: none has since it got on
    num_lone_failures: int = 0  # of steps with nothing else in them, since it got on
    failed_at: str | None = None  # the executor where such a step failed: another one tries it next, if there is one

    def is_suspect(self, num_output_tokens: int) -> bool:
        """Tell whether the request runs in steps of its own, because executors died or steps failed with it."""
        return self.failed_until > 0 or self.is_lethal(num_output_tokens)

    def is_lethal(self, num_output_tokens: int) -> bool:
        """Tell whether executors died of it, as far as known: it has not exceeded the output it had then."""
        return (
            self.num_executor_deaths >= MAX_EXECUTOR_DEATHS
            and self.last_death_offset is not None
            and num_output_tokens <= self.last_death_offset
        )

    def blame_death(self, num_output_tokens: int) -> None:
        """Count an executor's death against it, unless it has progressed since the last one."""
        has_progressed = self.last_death_offset is None or num_output_tokens > self.last_death_offset
        self.num_executor_deaths = 1 if has_progressed else self.num_executor_deaths + 1
        self.last_death_offset = num_output_tokens

    def clear_death(self) -> None:
        """Take back a death: the executor lives."""
        self.num_executor_deaths = max(0, self.num_executor_deaths - 1)

    def blame_lone_failure(self, address: str) -> bool:
        """Count a failed step of its own; returns whether it has been tried often enough."""
        self.num_lone_failures += 1
        if self.num_lone_failures < MAX_LONE_FAILURES:
            self.failed_at = address
        return self.num_lone_failures >= MAX_LONE_FAILURES

    def note_progress(self) -> None:
        """Clear a failure when it has passed the step that failed."""
        self.failed_until = self.num_lone_failures = 0
        self.failed_at = None

    def is_better_elsewhere(self, address: str) -> bool | None:
        """Tell whether another executor should try it; None: no preference."""
        return None if self.failed_at is None else self.failed_at == address

    def quarantine_sentence(self) -> str:
        return (
            f"{self.num_executor_deaths} executors died while they ran it, the last one while it ran nothing else; it "
            "is not tried again"
        )


class Suspect(Protocol):
    """A request, as far as suspicion goes."""

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
    """A step without a result, by request: it outlives the rows, since what came of it may be told much later."""

    step_id: int
    positions: tuple[tuple[SuspectT, int], ...]  # of each request that ran, planned up to and including this step
    is_lone: bool  # nothing else ran, on whatever row


class Suspects(Generic[SuspectT]):
    """What is remembered of one executor."""

    def __init__(self) -> None:
        self.rows: set[int] = set()  # whose requests run in steps of their own until they get on
        self.is_doubted = False  # a step of one request failed, and none has succeeded since: others show that it can
        self.unanswered: tuple[UnansweredStep[SuspectT], ...] = ()  # at the moment when the executor was lost
        self.accused: tuple[SuspectT, ...] = ()  # of the executor's death, if it is lost

    def placed(self, row: int, request: Suspect) -> None:
        if request.is_suspect:
            self.rows.add(row)

    def left(self, row: int) -> None:
        self.rows.discard(row)

    def inherit(self, before: "Suspects[SuspectT]") -> None:
        """Take over `before`: it is the same process."""
        self.is_doubted = before.is_doubted

    def note_progress(self, progress: Iterable[tuple[int, SuspectT, int, int]]) -> None:
        """Clear those that have passed the output at which executors died or a step failed. `progress` gives each
        suspect's row, and how many tokens it has computed and put out.
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
        accused: Sequence[SuspectT],
    ) -> None:
        self.unanswered, self.accused = unanswered, tuple(accused) or before.accused

    def clear_blame(self) -> None:
        """Clear the blame: the lost executor is back as the same process."""
        for request in self.accused:
            request.suspicion.clear_death()


def blame_deaths(accused: Sequence[SuspectT]) -> SuspectT | None:
    """Count an executor's death against requests off its rows; returns the one it must be due to, if any. A suspect
    runs alone, so a request that had company was no suspect then.
    """
    is_sure = len(accused) == 1 and accused[0].suspicion.is_lethal(accused[0].num_output_tokens)
    for request in accused:
        request.suspicion.blame_death(request.num_output_tokens)
    return accused[0] if is_sure else None


def blame_failed_step(
    unanswered: Iterable[UnansweredStep[SuspectT]], planned_by: ExecutorDescription, told_by: ExecutorDescription
) -> SuspectT | None:
    """Suspect the requests of a failed step; returns the one that was alone in it. `planned_by` is the executor when
    the unanswered steps were planned.
    """
    failed = told_by.failed_step
    if failed is None or (planned_by.incarnation, planned_by.epoch) != (told_by.incarnation, failed.epoch):
        return None  # not planned here, or judged already
    step = next((step for step in unanswered if step.step_id == failed.step_id), None)
    if step is None:
        return None
    suspects = []
    for request, position in step.positions:
        if request.address in (None, told_by.address):  # else it runs elsewhere, since this was lost
            request.suspicion.failed_until = position
            suspects.append(request)
    return suspects[0] if suspects and step.is_lone else None


def in_order_of_trial(
    on_rows: Sequence[tuple[int, SuspectT]], in_line: Sequence[SuspectT]
) -> Iterator[tuple[int | None, SuspectT]]:
    """Return the suspects in the order of trial, with their rows: each once before any twice."""
    for is_second_try in (False, True):
        yield from (pair for pair in on_rows if _was_tried(pair[1]) is is_second_try)
        first = next((request for request in in_line if _was_tried(request) is is_second_try), None)
        if first is not None:
            yield None, first


def _was_tried(request: Suspect) -> bool:
    return request.suspicion.num_lone_failures > 0

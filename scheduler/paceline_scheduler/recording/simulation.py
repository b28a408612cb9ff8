"""A core run again over what came from outside in a recording, with executors that are simulated.

The core is the real one, fed with the recorded arrivals, cancels and bounds of tenants. An executor's step takes as
long as was learned, and a request gets the output that it got. Left out are faults, clients that come back, and what a
faster answer would have made clients ask.
"""

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paceline.plan.hashes import HASH_START, grant_hash
from paceline.plan.values import BatchPlan, Int32Array, RecordId, RowFinish, StepResult, StepTimings
from paceline_scheduler.core.core import Core
from paceline_scheduler.core.events import (
    Cancel,
    Event,
    ExecutorAttached,
    Resume,
    SetTenants,
    StepFinished,
    Submit,
    Tick,
)
from paceline_scheduler.core.executors import ExecutorDescription, Placement, Snapshot
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.request import NOTHING_HELD, Request
from paceline_scheduler.errors import SchedulerError
from paceline_scheduler.recording.learned import Learned, StepCosts
from paceline_scheduler.recording.replay import Recording, ReplayObserver
from paceline_scheduler.recording.wire import RecordedEvent

_MAX_EXTRA_S = 600.0  # that a simulation may go on after the last recorded event
_NS = 1e9


@dataclass(slots=True)
class _Row:
    key: RecordId
    num_known: int
    num_computed: int
    output: list[int]  # all that it will be
    num_output: int
    finish: RowFinish
    is_over: bool = False
    right: float = 0.0  # drafts that are owed


class SimulatedExecutor:
    """Answers plans in order, each after its time, with the outputs of the recording."""

    def __init__(self, description: ExecutorDescription, learned: Learned, costs: StepCosts) -> None:
        self.description = description
        self._learned = learned
        self._costs = costs
        self._rows: dict[int, _Row] = {}
        self._grant_hash = HASH_START
        self._free_s = 0.0

    def run(self, plan: BatchPlan, now: float) -> tuple[float, StepResult]:
        """Return when the result of a plan sent now arrives, and the result."""
        for release in plan.releases:
            self._rows.pop(release.row, None)
        for new in plan.new_requests:
            assert isinstance(new, Placement), "the core writes no others"
            self._rows[new.row] = self._row(new)
        self._grant_hash = grant_hash(grant_hash(self._grant_hash, plan.grants), plan.shared)
        drafts = plan.num_draft_tokens if len(plan.num_draft_tokens) else np.zeros_like(plan.rows)
        token_ids: list[int] = []
        accepted: list[int] = []
        verified: list[int] = []
        num_tokens = num_pairs = 0
        for row, count, num_drafts in zip(
            plan.rows.tolist(), plan.num_scheduled_tokens.tolist(), drafts.tolist(), strict=True
        ):
            drawn, tried, begin = self._advance(self._rows[row], count, num_drafts)
            used = count - (num_drafts - tried)
            num_tokens += used
            num_pairs += used * begin + used * (used + 1) // 2
            token_ids += drawn
            accepted.append(len(drawn))
            verified.append(tried)
        whole_s, busy_s = self._costs.seconds(num_tokens, num_pairs, sum(verified)) if num_tokens else (1e-4, 0.0)
        self._free_s = max(now, self._free_s) + whole_s
        return self._free_s, StepResult(
            incarnation=plan.incarnation,
            epoch=plan.epoch,
            step_id=plan.step_id,
            rows=plan.rows,
            num_accepted=_column(accepted),
            token_ids=_column(token_ids),
            finishes=np.array([self._finish(row) for row in plan.rows.tolist()], dtype=np.uint8),
            grant_hash=self._grant_hash,
            timings=StepTimings(forward_ns=round(busy_s * _NS)),
            num_draft_tokens=_column(verified) if len(plan.num_draft_tokens) else plan.num_draft_tokens,
        )

    def _row(self, new: Placement) -> _Row:
        output, ended = self._learned.outputs.get(new.record_id, []), self._learned.ends.get(new.record_id)
        length = min(len(output) if ended is None else max(ended.num_output_tokens, 1), new.max_tokens)
        length = max(length, len(new.output_token_ids) + 1, 1)
        whole = (output + [0] * length)[:length]
        return _Row(
            key=new.record_id,
            num_known=len(new.prompt_token_ids) + len(new.output_token_ids),
            num_computed=new.num_cached_tokens,
            output=whole,
            num_output=len(new.output_token_ids),
            finish=RowFinish.LENGTH if length >= new.max_tokens else RowFinish.END_TOKEN,
        )

    def _advance(self, row: _Row, count: int, num_drafts: int) -> tuple[list[int], int, int]:
        """Return the tokens that a row draws, the drafts that were verified, and where it began."""
        begin = row.num_computed
        if row.is_over:
            return [], 0, begin
        row.num_computed += count - num_drafts
        if row.num_computed < row.num_known:
            return [], 0, begin
        row.right += num_drafts * self._learned.acceptance
        right = min(int(row.right), num_drafts)
        row.right -= right
        drawn = row.output[row.num_output : row.num_output + 1 + right]
        row.num_output += len(drawn)
        row.num_known += len(drawn)
        row.num_computed = row.num_known - 1
        row.is_over = row.num_output >= len(row.output)
        return drawn, num_drafts, begin

    def _finish(self, row: int) -> int:
        found = self._rows[row]
        return found.finish if found.is_over else RowFinish.GOES_ON


def _column(values: list[int]) -> Int32Array:
    return np.array(values, dtype=np.int32)


def simulate(recording: Recording, learned: Learned, limits: CoreLimits, observer: ReplayObserver) -> bool:
    """Returns whether all requests came to an end."""
    return _Simulation(learned, learned.step_costs(), limits, observer).run(list(_arrivals(recording)))


class _Simulation:
    def __init__(self, learned: Learned, costs: StepCosts, limits: CoreLimits, observer: ReplayObserver) -> None:
        self._core = Core(limits)
        self._learned = learned
        self._costs = costs
        self._observer = observer
        self._executors: dict[str, SimulatedExecutor] = {}
        self._coming: list[tuple[float, int, Event[Any]]] = []
        self._number = 0
        self._results: dict[str, deque[float]] = {}
        self._wake_s: float | None = None

    def run(self, arrivals: list[tuple[float, Event[Any]]]) -> bool:
        for at_s, event in arrivals:
            self._push(at_s, event)
        end_s = max((at_s for at_s, _ in arrivals), default=0.0) + _MAX_EXTRA_S
        while self._coming:
            at_s, _, event = heapq.heappop(self._coming)
            if at_s > end_s:
                return False
            if self._wake_s is not None and self._wake_s <= at_s:
                self._happen(self._wake_s, Tick())
            self._happen(at_s, event)
        return not len(self._core.state.requests)

    def _push(self, at_s: float, event: Event[Any]) -> None:
        self._number += 1
        heapq.heappush(self._coming, (at_s, self._number, event))

    def _happen(self, now: float, event: Event[Any]) -> None:
        if isinstance(event, ExecutorAttached):
            executor = SimulatedExecutor(event.description, self._learned, self._costs)
            self._executors[event.description.address] = executor
        try:
            effects = self._core.apply(event, now)
        except SchedulerError as error:
            self._observer.refused(self._core, event, now, type(error).__name__)
            return
        self._observer.saw(self._core, event, now, effects)
        self._wake_s = effects.wake_at if effects.wake_at is None else max(effects.wake_at, now + 1e-3)
        for address in effects.executors_to_plan:
            while (plan := self._core.plan(address, now)) is not None:
                self._observer.planned(self._core, address, now, plan)
                at_s, result = self._executors[address].run(plan, now)
                self._push(at_s, StepFinished(address, result))


def _arrivals(recording: Recording) -> Iterator[tuple[float, Event[Any]]]:
    """Yield what came from outside: executors when they were attached first, and requests when they were sent first."""
    begin = recording.fresh_core().state
    first_s = next((each.now for each in recording.records if isinstance(each, RecordedEvent)), 0.0)
    seen: set[object] = set()
    yield first_s, SetTenants(begin.tenants.bounds)
    for executor in begin.executors:
        seen.add(executor.description.address)
        yield first_s, ExecutorAttached(_anew(executor.description), Snapshot())
    for live in begin.requests.all():
        if live.final is None:
            seen.add(live.request.key)
            yield first_s, Submit((live.request,))
    for record in recording.records:
        if isinstance(record, RecordedEvent):
            for event in _outside(record.event, seen):
                yield record.now, event


def _outside(event: Event[Any], seen: set[object]) -> Iterator[Event[Any]]:
    match event:
        case ExecutorAttached(description, snapshot):
            if description.address not in seen:
                seen.add(description.address)
                yield ExecutorAttached(_anew(description), Snapshot())
            for number, row in enumerate(snapshot.rows):
                if row.request is not None and row.released is None and row.record_id not in seen:
                    seen.add(row.record_id)
                    request = replace(row.request, handle=-number - 1, model=description.model)
                    yield Submit((replace(request, prompt_token_ids=row.prompt_token_ids),))
        case Submit(requests) | Resume(requests):
            yield from _submitted(requests, seen)
        case Cancel() | SetTenants():
            yield event


def _submitted(requests: tuple[Request, ...], seen: set[object]) -> Iterator[Submit]:
    fresh = tuple(replace(request, point=NOTHING_HELD) for request in requests if request.key not in seen)
    seen.update(request.key for request in fresh)
    if fresh:
        yield Submit(fresh)


def _anew(description: ExecutorDescription) -> ExecutorDescription:
    return replace(description, failed_step=None)

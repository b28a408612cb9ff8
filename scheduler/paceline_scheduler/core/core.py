"""The scheduler's state machine: events and the time in, plans and outputs out.

The rules are elsewhere: for requests that come in `intake`, that end `ending`, for executors that come and go
`recovery`, for a step `executor/results` and `planning`. What changes several things at once is in `state`.
"""

from dataclasses import replace
from typing import Any

from paceline.plan.values import BatchPlan, FinalRelease, StepResult
from paceline_scheduler.core import ending, intake, recovery
from paceline_scheduler.core.events import (
    Acknowledge,
    BeginAnew,
    BeginDrain,
    Cancel,
    Detach,
    DrainExecutor,
    Effects,
    EndCompletion,
    Event,
    ExecutorAttached,
    ExecutorLost,
    ExecutorRemoved,
    ExpectExecutors,
    ReplyT,
    Resume,
    SetLimits,
    SetTenants,
    StepFinished,
    StreamEnded,
    Submit,
    Tick,
    UndrainExecutor,
)
from paceline_scheduler.core.executor import results
from paceline_scheduler.core.executor.attachment import StepInFlight
from paceline_scheduler.core.limits import CoreLimits, changed
from paceline_scheduler.core.outputs import Failure, TokenOutputs
from paceline_scheduler.core.planning.dispatch import KnownExecutors
from paceline_scheduler.core.planning.planner import decide
from paceline_scheduler.core.state import CoreState
from paceline_scheduler.core.views import CoreViews
from paceline_scheduler.errors import DivergenceError

_MOVES_EXECUTORS = {ExecutorAttached, StreamEnded, ExecutorLost, ExecutorRemoved, DrainExecutor, UndrainExecutor}
_CHANGES_CHOICES = {*_MOVES_EXECUTORS, Resume, SetLimits, SetTenants}


class Core:
    """`now` is seconds on the injected monotonic clock."""

    def __init__(self, limits: CoreLimits) -> None:
        self._go_on(CoreState(limits))

    @classmethod
    def of(cls, state: CoreState) -> "Core":
        """Return a core that goes on from a state, which is its own from now on."""
        core = cls(state.limits)
        state.requests.restored()
        core._go_on(state)
        return core

    def _go_on(self, state: CoreState) -> None:
        self._known: KnownExecutors = {}
        self._state = state
        self.views = CoreViews(state)

    @property
    def state(self) -> CoreState:
        """All that it knows, to be written down; not to be changed."""
        return self._state

    def apply(self, event: Event[ReplyT], now: float) -> Effects[ReplyT]:
        state = self._state
        reply: Any = None
        tokens: tuple[TokenOutputs, ...] = ()
        failures: tuple[Failure, ...] = ()
        to_plan: tuple[str, ...] | None = ()
        match event:
            case StepFinished(address, result):
                reply, tokens, failures = self._finish_step(address, result, now)
                to_plan = (address, *state.others_with_news(address))
            case Tick():
                failures, to_plan = (*ending.expire(state, now), *ending.refuse_late(state, now)), None
            case Submit(requests):
                intake.submit(state, requests, now)
                to_plan = None
            case Resume(requests):
                reply, to_plan = intake.resume(state, requests, now), None
            case Detach(handle):
                ending.detach(state, handle, now)
                to_plan = None
            case EndCompletion(handle, num_output_tokens, reason):
                reply, to_plan = ending.end(state, handle, FinalRelease(num_output_tokens, reason), now), None
            case Cancel(key):
                tokens, to_plan = (ending.cancel(state, key, now),), None
            case Acknowledge(keys):
                ending.acknowledge(state, keys)
                to_plan = None
            case ExpectExecutors(addresses):
                state.executors.expect(addresses)
            case ExecutorAttached(description, snapshot):
                tokens, failures = recovery.attach(state, description, snapshot, now)
                reply, to_plan = state.executors.running_at(description.address), None
            case StreamEnded(address):
                reply = state.executors.running_at(address)
                state.executors.stream_ended(address)
            case ExecutorLost(address):
                failures, to_plan = recovery.lose(state, address, now), None
            case ExecutorRemoved(address):
                failures, to_plan = recovery.remove(state, address, now), None
            case DrainExecutor(address, is_leaving):
                reply = state.executors.drain(address, is_leaving=is_leaving)
            case UndrainExecutor(address):
                state.executors.undrain(address)
            case SetLimits(limits):
                state.set_limits(changed(state.limits, state.limits_in_force, limits), now)
                to_plan = None
            case SetTenants(bounds):
                state.set_limits(replace(state.limits, tenants=bounds), now)
                to_plan = None
            case BeginDrain():
                state.is_draining = True
            case BeginAnew():
                failures = ending.begin_anew(state, event)
            case _:
                raise AssertionError(f"no rule for {event}")
        self._note_changes(event, now)
        addresses = tuple(state.executors.by_address) if to_plan is None else to_plan
        return Effects(reply, addresses, state.requests.next_s(), tokens, failures, state.take_ended())

    def _note_changes(self, event: Event[ReplyT], now: float) -> None:
        if type(event) in _MOVES_EXECUTORS:
            self._state.note_outages(now)
        if type(event) in _CHANGES_CHOICES:
            self._known.clear()

    def plan(self, address: str, now: float) -> BatchPlan | None:
        """None when there is nothing to do or enough is in flight."""
        state = self._state
        executor = state.executors.by_address.get(address)
        if executor is None or not executor.attached or not executor.takes_plan(state.limits):
            return None
        state.num_plannings += 1
        has_news = executor.ledger.settle()
        queue = state.waiting.of_model(executor.description.model)
        waiting = state.executors.waiting_for(executor, queue, state.limits, now, self._known)
        decision = decide(executor.view(), waiting, state.limits)
        executor.full_tenants = frozenset(decision.work.full_tenants)
        for live in decision.work.left_to_others:
            live.leave_to_others(now, waiting.meant.get(live))
        if decision.is_empty and not has_news:
            return None
        for admission in decision.work.admissions:
            state.waiting.remove(admission.live)
        plan = executor.ledger.commit(decision, now)
        executor.await_result(plan, decision)
        if queue and state.requests.may_be_detached:
            ending.end_detached(state, executor, now)
        return plan

    def busy_beyond_ahead_s(self, address: str) -> float:
        """How long the steps in flight take, as expected, less `run_ahead_s`."""
        in_flight = self._state.executors.by_address[address].in_flight
        return sum(step.predicted_ns for step in in_flight) / 1e9 - self._state.limits.run_ahead_s

    def _finish_step(
        self, address: str, result: StepResult, now: float
    ) -> tuple[StepInFlight, tuple[TokenOutputs, ...], tuple[Failure, ...]]:
        state = self._state
        executor = state.executors.by_address.get(address)
        if executor is None or not executor.attached:
            raise DivergenceError(
                f"a result of step {result.step_id} came from an executor that this scheduler does not drive"
            )
        step = results.matching_step(executor, result)
        tokens, failures, ended = results.apply_result(executor, step, result, now)
        state.num_untested = 0
        for live in ended:
            state.close(live)
            state.count_output(live, now)
        for row in step.released_rows:
            executor.suspects.left(row)
            live = executor.ledger.vacate(row)
            if not live.is_orphan:
                state.wait_again(live, now)
        return step, tokens, failures + ending.refuse_late(state, now)

"""The step thread: loads the model, then runs plans in the order they come, and answers questions between steps.

Where the runner allows it, a plan is launched before the step before it has landed; a question is answered when all
that is launched has landed. Nothing else may touch the rows or enter the device. Refuses to know who drives: a plan of
an epoch that has ended is dropped; and how the thread waits: its work yields what for.

What is put into the thread's queue is bounded: at most `max_plans_in_flight` plans of the one stream that drives, and
one question per caller.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeVar

import structlog

from paceline.plan.values import BatchPlan, FailedStep, NewRequest, StepResult
from paceline.process.trace_ids import trace_fields
from paceline_executor.errors import DeviceError, ServiceError, StepFailedError
from paceline_executor.link.description import Description, Load
from paceline_executor.link.engine import Engine, Ticket
from paceline_executor.link.failure_attribution import FailureAttribution, requests_of
from paceline_executor.link.step_thread import OwnThread, Pause, StepThread, Wait
from paceline_executor.profiling.profiler import Profiler, StepMark
from paceline_executor.rows.table import RowTable

T = TypeVar("T")

_log = structlog.get_logger()

MIN_STEP_BOUND_NS = 1_200_000_000
_MAX_PREDICTED_NS = 60_000_000_000  # a prediction beyond this would only hide a stuck step
# Between two looks whether the device is done, while there is room for another plan: every look costs a core time.
_LOOK_S, _LONG_LOOK_S = 0.0002, 0.002
_SURE = 0.8  # of a predicted time has to pass
_MAX_NAMED = 4  # requests of a step that failed
_IDLE_WAKE_S = 5.0  # an idle thread still lets records go in time


@dataclass(frozen=True, slots=True)
class RunningStep:
    """On the monotonic clock; beyond its bound it counts as wedged."""

    step_id: int
    started_ns: int
    bound_ns: int

    def starting(self, now_ns: int) -> "RunningStep":
        """The step before has only just ended."""
        return replace(self, started_ns=now_ns, bound_ns=now_ns + self.bound_ns - self.started_ns)


@dataclass(frozen=True, slots=True)
class StepRefused:
    """No later plan of its epoch is executed either. `failed`: the plan was sound, and its step failed."""

    epoch: int
    error: ServiceError
    failed: FailedStep | None = None


Report = StepResult | StepRefused


@dataclass(frozen=True, slots=True)
class Submitted:
    plan: BatchPlan
    arrived_ns: int


@dataclass(frozen=True, slots=True)
class _LaunchedStep:
    submitted: Submitted
    ticket: Ticket
    idle_ns: int
    start_ns: int


@dataclass(frozen=True, slots=True)
class _Question:
    reply: Callable[[Engine], None]


@dataclass(frozen=True, slots=True)
class _Stop:
    """The end, after what is queued."""


Command = Submitted | _Question | _Stop
T_co = TypeVar("T_co", covariant=True)
_Turns = Generator[Wait | Pause, Command | None, T_co]
_IDLE = Wait(_IDLE_WAKE_S)


class StepLoop:
    """Call it from the event loop only.

    `thread` runs the steps, if it is not one of this process.
    """

    def __init__(
        self,
        load: Load,
        on_report: Callable[[Report], None],
        clock_ns: Callable[[], int] = time.monotonic_ns,
        thread: StepThread[Command] | None = None,
    ) -> None:
        self._load = load
        self._clock_ns = clock_ns
        self._on_report = on_report
        self._thread: StepThread[Command] = thread or OwnThread()
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[Description] = self._loop.create_future()
        self.ended: asyncio.Future[None] = self._loop.create_future()  # done when the thread has ended, or crashed
        self._has_failed = False
        self._epoch = 0  # plans of other epochs are dropped; written by the event loop only
        self._failed_epoch = 0  # written by the thread only, as everything below
        self._running: tuple[RunningStep, ...] = ()  # in flight, the first with the time of its start
        self._in_flight: deque[_LaunchedStep] = deque()
        self._idle: tuple[int, int | None] = (0, None)  # so long before, and since when it is again
        self._attribution = FailureAttribution()
        self._last_step = (0, 0)

    @property
    def running(self) -> RunningStep | None:
        """Returns the oldest in flight, None when idle."""
        running = self._running
        return running[0] if running else None

    @property
    def bound_ns(self) -> int:
        """If each step in flight takes as long as it may; 0 when idle."""
        running = self._running
        return running[0].bound_ns + sum(step.bound_ns - step.started_ns for step in running[1:]) if running else 0

    @property
    def idle_ns(self) -> int:
        """How long there was no step since the model was loaded, up to now."""
        before_ns, since_ns = self._idle
        return before_ns + (0 if since_ns is None else self._clock_ns() - since_ns)

    @property
    def last_step_id(self) -> int:
        epoch, step_id = self._last_step
        return step_id if epoch == self._epoch else 0

    async def start(self) -> Description:
        """Wait until the model is loaded; raises what loading raises."""
        self._thread.start(self._run())
        return await self._loaded

    def begin_epoch(self, epoch: int) -> None:
        """Only plans of this epoch are launched; 0 launches none."""
        self._epoch = epoch

    def submit(self, plan: BatchPlan) -> None:
        """Its report comes through `on_report`, on the event loop, unless its epoch ends first."""
        self._thread.put(Submitted(plan, self._clock_ns()))

    async def ask(self, question: Callable[[RowTable], T]) -> T:
        """At the boundary after the steps that are launched."""
        return await self._ask(lambda engine: question(engine.table))

    async def ask_profiler(self, question: Callable[[Profiler], T]) -> T:
        return await self._ask(lambda engine: question(engine.profiler))

    async def _ask(self, question: Callable[[Engine], T]) -> T:
        answer: Future[T] = Future()

        def reply(engine: Engine) -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(question(engine))
            except Exception as error:
                answer.set_exception(error)

        self._thread.put(_Question(reply))
        return await asyncio.wrap_future(answer)

    def fail(self, error: DeviceError) -> None:
        """So does the step that runs, whether or not it ever ends."""
        if (running := self.running) is not None:
            failed = FailedStep(self._epoch, running.step_id, str(error))
            self._on_report(StepRefused(self._epoch, StepFailedError(str(error)), failed))
        self._has_failed = True
        _settle(self._loaded, error)
        _settle(self.ended, error)

    def stop(self, timeout_s: float) -> bool:
        """Let the thread end after its queue; returns whether it has. A thread that loads, or whose device failed
        beside it, is not waited for. Blocks; call it outside of the event loop's thread.
        """
        self._thread.put(_Stop())
        return self._has_failed or self._thread.join(0.0 if self._loaded.cancelled() else timeout_s)

    def _run(self) -> _Turns[None]:
        try:
            loaded = self._load()
        except BaseException as error:
            self._post(_settle, self._loaded, error)
            return
        self._post(_settle, self._loaded, loaded.description)
        try:
            yield from self._serve(loaded.engine)
        except BaseException as error:
            self._post(_settle, self.ended, error)
        else:
            self._post(_settle, self.ended, None)

    def _serve(self, engine: Engine) -> _Turns[None]:
        self._begin_idling()
        while not isinstance(command := (yield from self._next_command(engine)), _Stop):
            if isinstance(command, _Question):
                yield from self._land_all(engine)
                # Asked often enough, this thread is never idle.
                engine.table.trim_records(self._clock_ns())
                command.reply(engine)
                continue
            while self._is_wanted(command.plan) and not engine.can_launch(command.plan):
                yield from self._land(engine)
            if self._is_wanted(command.plan):
                yield from self._launch(engine, command)
        yield from self._land_all(engine)

    def _next_command(self, engine: Engine) -> _Turns[Command]:
        """Steps that end meanwhile land."""
        while self._in_flight:
            if len(self._in_flight) < engine.max_in_flight:
                ticket = self._in_flight[0].ticket
                is_done = engine.is_done(ticket)
                command = yield Wait(0.0 if is_done else self._look_s(), ticket)
                if command is not None:
                    return command
                if not is_done:
                    continue
            yield from self._land(engine)
        while (command := (yield _IDLE)) is None:
            engine.table.trim_records(self._clock_ns())
        return command

    def _look_s(self) -> float:
        ran_ns = self._clock_ns() - self._running[0].started_ns
        left_s = (_SURE * self._in_flight[0].submitted.plan.predicted_ns - ran_ns) / 1e9
        return max(_LOOK_S, min(left_s, _LONG_LOOK_S))

    def _is_wanted(self, plan: BatchPlan) -> bool:
        return plan.epoch == self._epoch != self._failed_epoch

    def _launch(self, engine: Engine, submitted: Submitted) -> _Turns[None]:
        plan, start_ns = submitted.plan, self._clock_ns()
        bound_ns = max(MIN_STEP_BOUND_NS, min(plan.predicted_ns, _MAX_PREDICTED_NS) * 12 // 5)
        before_ns, since_ns = self._idle
        idle_ns = 0 if since_ns is None else start_ns - since_ns
        self._idle = before_ns + idle_ns, None
        before = self._running
        self._running = (*before, RunningStep(plan.step_id, start_ns, start_ns + bound_ns))
        try:
            with engine.profiler.span("launch"):
                ticket = engine.launch(plan)
        except ServiceError as error:
            self._running = before
            yield from self._land_all(engine)  # they come before it, and one of them may fail
            if plan.epoch != self._failed_epoch:
                self._refuse(engine, plan, error)
            return
        self._in_flight.append(_LaunchedStep(submitted, ticket, idle_ns, start_ns))
        yield from self._draw(engine)

    def _land_all(self, engine: Engine) -> _Turns[None]:
        while self._in_flight:
            yield from self._land(engine)

    def _land(self, engine: Engine) -> _Turns[None]:
        yield Wait(None, self._in_flight[0].ticket)
        launched = self._in_flight.popleft()
        plan = launched.submitted.plan
        try:
            waited_ns = self._running[0].started_ns - launched.submitted.arrived_ns
            with engine.profiler.span("land"):
                result = engine.collect(launched.ticket, waited_ns, launched.idle_ns)
        except (ServiceError, DeviceError) as error:
            self._in_flight.clear()
            self._running = ()
            self._refuse(engine, plan, error)
            return
        self._running = tuple(step.starting(self._clock_ns()) for step in self._running[1:2]) + self._running[2:]
        self._last_step = (plan.epoch, plan.step_id)
        with engine.profiler.span("tell"):
            self._post(self._on_report, result)
        yield from self._draw(engine)
        if engine.profiler.is_on:
            engine.profiler.end_step(_mark(launched, waited_ns, self._clock_ns()))
        self._attribution.succeeded(plan)
        self._begin_idling()

    def _draw(self, engine: Engine) -> _Turns[None]:
        while (pause := engine.pause()) is not None:
            yield pause
        engine.draw()

    def _refuse(self, engine: Engine, plan: BatchPlan, error: ServiceError | DeviceError) -> None:
        """No later plan of its epoch runs. Raises DeviceError when none can run. Launched steps have landed, or were
        taken back.
        """
        self._failed_epoch = plan.epoch
        if error.__cause__ is not None:
            about = _names([*islice(requests_of(plan, engine.table), _MAX_NAMED)], plan.rows.size)
            _log.error("step_failed", step_id=plan.step_id, **about, exc_info=error.__cause__)
        told = StepFailedError(str(error)) if isinstance(error, DeviceError) else error
        is_failure = isinstance(told, StepFailedError)
        failed = FailedStep(plan.epoch, plan.step_id, str(told)) if is_failure else None
        self._post(self._on_report, StepRefused(plan.epoch, told, failed))
        if isinstance(error, DeviceError):
            raise error
        if is_failure:
            self._attribution.failed(plan, engine.table)
        self._begin_idling()

    def _begin_idling(self) -> None:
        if not self._in_flight:
            self._idle = self._idle[0], self._clock_ns()

    def _post(self, callback: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has gone; so will this thread
            self._loop.call_soon_threadsafe(callback, *arguments)


def _names(requests: Sequence[NewRequest], num_rows: int) -> dict[str, object]:
    """Of one request as every line has them, of several as lists."""
    if num_rows == 1 and requests:
        (alone,) = requests
        record_id = alone.record_id
        return {"request_id": record_id.request_id, "tenant": record_id.tenant, **trace_fields(alone.trace_parent)}
    traces = [trace_fields(request.trace_parent).get("trace_id", "") for request in requests]
    request_ids = [request.record_id.request_id for request in requests]
    return {"num_rows": num_rows, "request_ids": request_ids, "trace_ids": [trace for trace in traces if trace]}


def _mark(launched: _LaunchedStep, waited_ns: int, end_ns: int) -> StepMark:
    plan, start_ns = launched.submitted.plan, launched.start_ns
    num_tokens = int(launched.ticket.launched.prepared.num_tokens.sum())
    num_rows = len(launched.ticket.launched.prepared.rows)
    return StepMark(
        plan.step_id, num_rows, num_tokens, plan.predicted_ns, waited_ns, launched.idle_ns, start_ns, end_ns
    )


def _settle(future: asyncio.Future[T], outcome: T | BaseException) -> None:
    if future.done():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)

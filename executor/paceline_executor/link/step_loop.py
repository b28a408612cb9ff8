"""The step thread: loads the model, then runs plans in the order they come, and answers questions between two steps.

Knows one thread, one queue and the engine. Nothing else may touch the rows or enter the device, because only one thread
of a process may own its OpenMP team. It refuses to know who drives: a plan of an epoch that has ended is dropped.

The queue itself has no bound; what is put into it does: at most `max_plans_in_flight` plans of the one stream that
drives, and one question per caller that waits for its answer.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TypeVar

import structlog

from paceline.plan.values import BatchPlan, FailedStep, StepResult, StepTimings
from paceline_executor.errors import ServiceError, StepFailedError
from paceline_executor.link.description import Description, Load
from paceline_executor.link.engine import Engine
from paceline_executor.link.lone_failures import LoneFailures
from paceline_executor.rows.table import RowTable

T = TypeVar("T")

MIN_STEP_BOUND_NS = 1_200_000_000
_MAX_PREDICTED_NS = 60_000_000_000  # a prediction beyond this would only hide a stuck step
_IDLE_WAKE_S = 5.0  # an idle thread still lets records go when their time is over


@dataclass(frozen=True, slots=True)
class RunningStep:
    """The step being executed, on the monotonic clock; beyond its bound it counts as wedged."""

    step_id: int
    started_ns: int
    bound_ns: int


@dataclass(frozen=True, slots=True)
class StepRefused:
    """A plan was not executed, and no later one of its epoch will be. `failed`: it was sound, and its step failed."""

    epoch: int
    error: ServiceError
    failed: FailedStep | None = None


Report = StepResult | StepRefused


@dataclass(frozen=True, slots=True)
class _Submitted:
    plan: BatchPlan
    arrived_ns: int


@dataclass(frozen=True, slots=True)
class _Question:
    reply: Callable[[RowTable], None]


class StepLoop:
    """The step thread, as the event loop sees it. Its methods are called from the event loop only."""

    def __init__(
        self, load: Load, on_report: Callable[[Report], None], clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._load = load
        self._clock_ns = clock_ns
        self._on_report = on_report
        self._commands: queue.SimpleQueue[_Submitted | _Question | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="step", daemon=True)
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[Description] = self._loop.create_future()
        self.ended: asyncio.Future[None] = self._loop.create_future()  # done when the thread has ended, or crashed
        self._epoch = 0  # plans of other epochs are dropped; written by the event loop only
        self._failed_epoch = 0  # written by the thread only, as everything below
        self._running: RunningStep | None = None
        self._last_step = (0, 0)
        self._log = structlog.get_logger()

    @property
    def running(self) -> RunningStep | None:
        """The step being executed, or None when idle."""
        return self._running

    @property
    def last_step_id(self) -> int:
        """The last step executed in the current epoch; 0 before the first."""
        epoch, step_id = self._last_step
        return step_id if epoch == self._epoch else 0

    async def start(self) -> Description:
        """Start the thread and wait until the model is loaded; raises what loading raises."""
        self._thread.start()
        return await self._loaded

    def begin_epoch(self, epoch: int) -> None:
        """From now on only plans of this epoch are launched; 0 launches none."""
        self._epoch = epoch

    def submit(self, plan: BatchPlan) -> None:
        """Queue a plan; its report comes through `on_report`, on the event loop, unless its epoch ends first."""
        self._commands.put(_Submitted(plan, self._clock_ns()))

    async def ask(self, question: Callable[[RowTable], T]) -> T:
        """The answer to a question about the rows, at the boundary after the running step."""
        answer: Future[T] = Future()

        def reply(table: RowTable) -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(question(table))
            except Exception as error:
                answer.set_exception(error)

        self._commands.put(_Question(reply))
        return await asyncio.wrap_future(answer)

    def stop(self, timeout_s: float) -> bool:
        """Let the thread end after what is queued; says whether it has ended. A thread still loading is not waited for.

        Blocks; call it from another thread than the event loop's.
        """
        self._commands.put(None)
        if self._thread.is_alive() and not self._loaded.cancelled():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            loaded = self._load()
        except BaseException as error:
            self._post(_settle, self._loaded, error)
            return
        self._post(_settle, self._loaded, loaded.description)
        try:
            self._serve(loaded.engine)
        except BaseException as error:
            self._post(_settle, self.ended, error)
        else:
            self._post(_settle, self.ended, None)

    def _serve(self, engine: Engine) -> None:
        idle_since_ns = self._clock_ns()
        lone_failures = LoneFailures()
        while True:
            try:
                command = self._commands.get(timeout=_IDLE_WAKE_S)
            except queue.Empty:
                engine.table.trim_records(self._clock_ns())
                continue
            if command is None:
                return
            if isinstance(command, _Question):
                command.reply(engine.table)
            elif command.plan.epoch == self._epoch != self._failed_epoch:
                report = self._step(engine, command, idle_since_ns)
                self._post(self._on_report, report)
                if isinstance(report, StepResult):
                    lone_failures.succeeded(command.plan)
                elif report.failed is not None:
                    lone_failures.failed(command.plan, engine.table)
                idle_since_ns = self._clock_ns()

    def _step(self, engine: Engine, command: _Submitted, idle_since_ns: int) -> Report:
        plan, start_ns = command.plan, self._clock_ns()
        bound_ns = max(MIN_STEP_BOUND_NS, min(plan.predicted_ns, _MAX_PREDICTED_NS) * 12 // 5)
        self._running = RunningStep(plan.step_id, start_ns, start_ns + bound_ns)
        try:
            step = engine.execute(plan)
        except ServiceError as error:
            self._failed_epoch = plan.epoch
            if error.__cause__ is not None:
                self._log.error("step_failed", step_id=plan.step_id, exc_info=error.__cause__)
            is_failure = isinstance(error, StepFailedError)
            failed = FailedStep(plan.epoch, plan.step_id, str(error)) if is_failure else None
            return StepRefused(plan.epoch, error, failed)
        finally:
            self._running = None
        self._last_step = (plan.epoch, plan.step_id)
        timings = StepTimings(
            waited_ns=start_ns - command.arrived_ns,
            prepare_ns=step.prepare_ns,
            forward_ns=step.forward_ns,
            sample_ns=step.sample_ns,
            idle_ns=start_ns - idle_since_ns,
        )
        return replace(step.result, timings=timings)

    def _post(self, callback: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has gone; so will this thread
            self._loop.call_soon_threadsafe(callback, *arguments)


def _settle(future: asyncio.Future[T], outcome: T | BaseException) -> None:
    if future.done():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)

"""A simulated executor with time: streams that attach, a step loop that takes as long as a real one would.

Knows streams, the fence and the running step. Refuses to know gRPC: messages go in and out through queues.

A stream is accepted in the order of the protocol: the old one ends, plans that were not launched are dropped, the
running step finishes and tells nobody, then the new stream gets the state of that boundary.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import count

from paceline.plan.values import PROTOCOLS, BatchPlan, Claim, ProtocolRange, StepResult
from paceline_scheduler.core.executors import ExecutorDescription, Snapshot
from paceline_scheduler.simulator.executor import SimulatedExecutor
from paceline_scheduler.simulator.failures import SimulatedDeviceError, SimulatedStepError
from paceline_scheduler.simulator.fence import NOBODY, Approach, Fence, Ruling, Standing
from paceline_scheduler.simulator.violations import PlanViolationError

HEARTBEAT_S = 0.2
FROZEN_S = 0.6  # after such a gap between two heartbeats the executor itself had stood still
MIN_STEP_BOUND_S = 1.2
STEP_BOUND_FACTOR = 2.4
MAX_QUEUED = 4096
_ROUNDING_S = 0.001  # timers fire a little before or after the moment that is meant


class StreamEnd(Enum):
    """Why a stream ends from the executor's side."""

    SUPERSEDED = "a scheduler of a higher term holds the executor"
    REPLACED = "a newer stream was accepted"
    TURNED_AWAY = "too many schedulers wait in line"
    WEDGED = "the running step does not end"
    PROTOCOL = "no protocol version in common"
    VIOLATION = "the plan breaks a rule"
    STEP_FAILED = "a step failed as a whole"
    BROKEN = "the connection broke"


_ENDS = {
    Standing.SUPERSEDED: StreamEnd.SUPERSEDED,
    Standing.REPLACED: StreamEnd.REPLACED,
    Standing.DISPLACED: StreamEnd.REPLACED,
    Standing.TURNED_AWAY: StreamEnd.TURNED_AWAY,
}


@dataclass(frozen=True, slots=True)
class InLine:
    """Another scheduler holds the executor."""

    holder: Claim


@dataclass(frozen=True, slots=True)
class Accepted:
    """The scheduler drives the executor from this state on, in this version of the protocol."""

    description: ExecutorDescription
    snapshot: Snapshot
    protocol: int


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life; names the running step, 0 when idle."""

    running_step_id: int = 0
    running_ns: int = 0


@dataclass(frozen=True, slots=True)
class Draining:
    """The executor is going away."""

    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """Nothing follows."""

    end: StreamEnd
    detail: str
    holder: Claim = NOBODY


Outgoing = InLine | Accepted | StepResult | Beat | Draining | Ended


@dataclass(slots=True, eq=False)
class Stream:
    """One plan stream. `outbox` holds what is to be sent."""

    stream_id: int
    claim: Claim
    protocol: int  # 0 when there is none in common
    is_welcome: bool = False
    has_ended: bool = False
    outbox: asyncio.Queue[Outgoing] = field(default_factory=lambda: asyncio.Queue(MAX_QUEUED))


@dataclass(frozen=True, slots=True, eq=False)
class _RunningStep:
    step_id: int
    stream: Stream
    started_s: float
    bound_s: float


class SimulatedService:
    """One executor process. `time_scale` stretches the simulated step times; 0 runs steps at once.

    `on_first_plan` is called with the first plan of each epoch.
    """

    def __init__(
        self,
        executor: SimulatedExecutor,
        clock: Callable[[], float],
        time_scale: float = 1.0,
        protocols: ProtocolRange = PROTOCOLS,
        on_first_plan: Callable[[], None] = lambda: None,
    ) -> None:
        self.executor = executor
        self.time_scale = time_scale
        self.protocols = protocols
        self.violations: list[str] = []
        self.fence = Fence()
        self._on_first_plan = on_first_plan
        self._clock = clock
        self._last_beat_s = clock()
        self._stream_ids = count(1)
        self._streams: dict[int, Stream] = {}  # open ones
        self._driver: Stream | None = None
        self._running: _RunningStep | None = None
        self._drain_reason = ""
        self._plans_arrived = asyncio.Event()
        self._line_moved = asyncio.Event()

    @property
    def highest_term(self) -> int:
        """The highest term that was accepted or stands in line."""
        return self.fence.highest_term

    @property
    def holder_scheduler_id(self) -> str:
        """Who drives; empty when nobody does."""
        return self.holder.scheduler_id

    @property
    def holder(self) -> Claim:
        """The claim of who drives; NOBODY's when nobody does."""
        return self.fence.claim if self._driver else NOBODY

    def hello(
        self,
        scheduler_id: str,
        term: int,
        approach: Approach = Approach.WAIT,
        protocols: ProtocolRange = PROTOCOLS,
        address: str = "",
    ) -> Stream:
        """Open a stream: it is accepted, stands in line, or ends at once."""
        now_s = self._now_s()
        claim = Claim(term, scheduler_id, address)
        stream = Stream(next(self._stream_ids), claim, self.protocols.highest_in_common(protocols) or 0)
        if not stream.protocol:
            self._end(stream, StreamEnd.PROTOCOL, _mismatch(self.protocols, protocols))
            return stream
        self._streams[stream.stream_id] = stream
        self._obey(self.fence.arrive(stream.stream_id, stream.claim, approach, now_s))
        self._line_moved.set()
        return stream

    def hear(self, stream: Stream, plan: BatchPlan | None) -> None:
        """Take a message: a plan, or None for a heartbeat. What comes on a stream that has ended has no effect."""
        if stream.has_ended:
            return
        self._obey(self.fence.hear(stream.stream_id, self._now_s()))
        if plan is None:
            return
        try:
            if stream is not self._driver or not stream.is_welcome:
                raise PlanViolationError("only a welcome stream sends plans", stream.claim.scheduler_id)
            self.executor.receive(plan)
            if plan.step_id == 1:
                self._on_first_plan()
        except PlanViolationError as error:
            self._violated(stream, error)
        self._plans_arrived.set()

    def leave(self, stream: Stream) -> None:
        """A stream ended from the other side."""
        stream.has_ended = True
        self._streams.pop(stream.stream_id, None)
        if stream is self._driver:
            self._driver = None
            self._drop_plans()
        self._obey(self.fence.leave(stream.stream_id, self._now_s()))
        self._line_moved.set()

    def beat(self) -> None:
        """Say on every stream that the executor is alive, and look whether time has changed who drives."""
        now_s = self._last_beat_s = self._now_s()
        for stream in self._streams.values():
            if stream.outbox.empty():
                stream.outbox.put_nowait(self._sign_of_life(now_s))
        driver, running = self._driver, self._running
        if driver is not None and not driver.is_welcome and running is not None and now_s > running.bound_s:
            self._end(driver, StreamEnd.WEDGED, f"step {running.step_id}")
        self._obey(self.fence.look(now_s))

    def drain(self, reason: str) -> None:
        """Tell every scheduler, and those still to come, that this executor is going away."""
        self._drain_reason = reason
        for stream in self._streams.values():
            stream.outbox.put_nowait(Draining(reason))

    def break_stream(self) -> None:
        """Let the driver's stream break, as a network does."""
        if self._driver is not None:
            self._end(self._driver, StreamEnd.BROKEN, "cut by the test")

    def restart(self) -> None:
        """Die and come back as another incarnation: every stream breaks, nothing is remembered."""
        streams, self._streams = list(self._streams.values()), {}
        self._driver = self._running = None
        self._drain_reason = ""
        for stream in streams:
            self._end(stream, StreamEnd.BROKEN, "the executor died")
        self.fence = Fence()
        self.executor.restart()

    async def run_steps(self) -> None:
        """Run plans as they arrive, each for as long as it takes, and beat, until cancelled.

        Raises an ExceptionGroup with a SimulatedDeviceError when the executor takes itself for the cause of failures:
        then its process should end.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._beat_loop())
            tasks.create_task(self._step_loop())

    async def _beat_loop(self) -> None:
        while True:
            self.beat()
            beat_s = self._clock() + HEARTBEAT_S
            while (now_s := self._clock()) < beat_s - _ROUNDING_S:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._next_look_s(beat_s) - now_s):
                        await self._line_moved.wait()
                self._obey(self.fence.look(self._now_s()))
                self._line_moved.clear()

    def _next_look_s(self, beat_s: float) -> float:
        """When to look at the fence: when time alone gives the executor to one in line, at the latest at a beat."""
        change_s = self.fence.next_change_s()
        if change_s is None or change_s <= self._clock():  # whoever is in line then is silent
            return beat_s
        return min(beat_s, change_s + _ROUNDING_S)

    async def _step_loop(self) -> None:
        idle_since_s = self._clock()
        while True:
            driver = self._driver
            if driver is None or not self.executor.num_plans_waiting:
                self._plans_arrived.clear()
                await self._plans_arrived.wait()
                continue
            idle_s = self._clock() - idle_since_s
            running = self._launch(driver)
            await asyncio.sleep(self.executor.next_step_ns() * self.time_scale / 1e9)
            if self._running is running:  # else the process died meanwhile
                self._finish(running, round(idle_s * 1e9))
            idle_since_s = self._clock()

    def _launch(self, driver: Stream) -> _RunningStep:
        plan, now_s = self.executor.next_plan, self._clock()
        bound_s = now_s + max(MIN_STEP_BOUND_S, STEP_BOUND_FACTOR * plan.predicted_ns / 1e9)
        self._running = _RunningStep(plan.step_id, driver, now_s, bound_s)
        return self._running

    def _finish(self, running: _RunningStep, idle_ns: int) -> None:
        self._running = None
        try:
            result = self.executor.run_next()
        except PlanViolationError as error:
            self._violated(running.stream, error)
        except SimulatedStepError as error:
            if not running.stream.has_ended:
                self._end(running.stream, StreamEnd.STEP_FAILED, str(error))
            if isinstance(error, SimulatedDeviceError):
                raise
        else:
            if running.stream is self._driver:  # to all others the snapshot says it
                timings = replace(result.timings, idle_ns=idle_ns)
                running.stream.outbox.put_nowait(replace(result, timings=timings))
        if self._driver is not None and not self._driver.is_welcome:
            self._welcome(self._driver)

    def _obey(self, rulings: tuple[Ruling, ...]) -> None:
        for ruling in rulings:
            stream, standing = self._streams.get(ruling.stream_id), ruling.standing
            if stream is None:
                continue
            match standing:
                case Standing.DRIVES:
                    self._accept(stream)
                case Standing.WAITS:
                    stream.outbox.put_nowait(InLine(self.fence.claim))
                case _:
                    self._end(stream, _ENDS[standing], standing.value)

    def _accept(self, stream: Stream) -> None:
        self._driver = stream
        self._drop_plans()
        if self._running is None:
            self._welcome(stream)

    def _welcome(self, stream: Stream) -> None:
        description, snapshot = self.executor.attach("")
        stream.is_welcome = True
        stream.outbox.put_nowait(Accepted(description, snapshot, stream.protocol))
        if self._drain_reason:
            stream.outbox.put_nowait(Draining(self._drain_reason))

    def _drop_plans(self) -> None:
        """Forget plans that were not launched, wholly: their epoch is over."""
        self.executor.drop_waiting(0 if self._running is None else 1)

    def _violated(self, stream: Stream, error: PlanViolationError) -> None:
        self.violations.append(str(error))
        if not stream.has_ended:
            self._end(stream, StreamEnd.VIOLATION, str(error))

    def _end(self, stream: Stream, end: StreamEnd, detail: str) -> None:
        stream.outbox.put_nowait(Ended(end, detail, self.fence.claim))
        self.leave(stream)

    def _sign_of_life(self, now_s: float) -> Beat:
        running = self._running
        return Beat(running.step_id, round((now_s - running.started_s) * 1e9)) if running else Beat()

    def _now_s(self) -> float:
        """What time it is; after a standstill of this process nobody is to blame for what it did not hear."""
        now_s = self._clock()
        if now_s - self._last_beat_s > FROZEN_S:
            self.fence.renew(now_s)
            self._last_beat_s = now_s
        return now_s


def _mismatch(ours: ProtocolRange, theirs: ProtocolRange) -> str:
    older = "executor" if ours.highest < theirs.highest else "scheduler"
    return f"the executor speaks protocol {ours}, the scheduler {theirs}; upgrade the {older}"

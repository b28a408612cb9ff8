"""A simulated executor with time: streams that attach, a step loop that takes as long as a real one would.

Knows one holder and those who wait behind it. Refuses to know gRPC: messages go in and out through queues.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum

from paceline_scheduler.core.executors import ExecutorDescription, Snapshot
from paceline_scheduler.core.plan import BatchPlan, StepResult
from paceline_scheduler.simulator.executor import SimulatedExecutor
from paceline_scheduler.simulator.violations import PlanViolationError

LEASE_S = 1.0
MAX_QUEUED = 4096


class StreamEnd(Enum):
    """Why a stream ends from the executor's side."""

    SUPERSEDED = "a scheduler of a higher term holds the executor"
    REPLACED = "a newer stream was accepted"
    VIOLATION = "the plan breaks a rule"
    BROKEN = "the connection broke"


@dataclass(frozen=True, slots=True)
class InLine:
    """Another scheduler holds the executor."""

    holder_scheduler_id: str
    holder_term: int


@dataclass(frozen=True, slots=True)
class Accepted:
    """The scheduler drives the executor from this state on."""

    description: ExecutorDescription
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Draining:
    """The executor is going away."""

    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """Nothing follows."""

    end: StreamEnd
    detail: str
    holder_scheduler_id: str = ""
    holder_term: int = 0


Outgoing = InLine | Accepted | StepResult | Draining | Ended


@dataclass(slots=True, eq=False)
class Stream:
    """One plan stream. `outbox` holds what is to be sent."""

    scheduler_id: str
    term: int
    heard_s: float
    has_ended: bool = False
    outbox: asyncio.Queue[Outgoing] = field(default_factory=lambda: asyncio.Queue(MAX_QUEUED))

    @property
    def claim(self) -> tuple[int, str]:
        """What streams are compared by."""
        return (self.term, self.scheduler_id)


class SimulatedService:
    """One executor process. `time_scale` stretches the simulated step times; 0 runs steps at once."""

    def __init__(self, executor: SimulatedExecutor, clock: Callable[[], float], time_scale: float = 1.0) -> None:
        self.executor = executor
        self.time_scale = time_scale
        self.violations: list[str] = []
        self.highest_term = 0
        self._clock = clock
        self._last_claim: tuple[int, str] = (0, "")
        self._holder: Stream | None = None
        self._line: list[Stream] = []
        self._plans_arrived = asyncio.Event()

    @property
    def holder_scheduler_id(self) -> str:
        """Who drives; empty when nobody does."""
        return self._holder.scheduler_id if self._holder else ""

    def hello(self, scheduler_id: str, term: int) -> Stream:
        """Open a stream: it is accepted, stands in line, or ends at once."""
        stream = Stream(scheduler_id, term, self._clock())
        is_return = scheduler_id == self._last_claim[1]
        self.highest_term = max(self.highest_term, term)
        if stream.claim < self._last_claim:
            self._end(stream, StreamEnd.SUPERSEDED, "attach again with a higher term")
        elif self._holder is None or is_return or self._is_silent(self._holder):
            self._accept(stream)
        else:
            self._line.append(stream)
            stream.outbox.put_nowait(InLine(self._last_claim[1], self._last_claim[0]))
        return stream

    def hear(self, stream: Stream, plan: BatchPlan | None) -> None:
        """Take a message: a plan, or None for a heartbeat."""
        stream.heard_s = self._clock()
        if plan is None or stream.has_ended:
            return
        try:
            if stream is not self._holder:
                raise PlanViolationError("only the holder sends plans", stream.scheduler_id)
            self.executor.receive(plan)
        except PlanViolationError as error:
            self._violated(stream, error)
        self._plans_arrived.set()

    def leave(self, stream: Stream) -> None:
        """A stream ended from the other side."""
        if stream in self._line:
            self._line.remove(stream)
        if stream is self._holder:
            self._holder = None
        self.let_in()

    def let_in(self) -> None:
        """Give the executor to the highest in line, if it is free. Called from time to time."""
        if self._holder is not None and not self._is_silent(self._holder):
            return
        alive = [stream for stream in self._line if not self._is_silent(stream)]
        if alive:
            self._accept(max(alive, key=lambda stream: stream.claim))

    def drain(self, reason: str) -> None:
        """Tell the holder that this executor is going away."""
        if self._holder is not None:
            self._holder.outbox.put_nowait(Draining(reason))

    def break_stream(self) -> None:
        """Let the holder's stream break, as a network does."""
        if self._holder is not None:
            self._end(self._holder, StreamEnd.BROKEN, "cut by the test")
            self._holder = None

    def restart(self) -> None:
        """Die and come back as another incarnation."""
        self.break_stream()
        self._last_claim = (0, "")
        self.executor.restart()

    async def run_steps(self) -> None:
        """Run plans as they arrive, each for as long as it takes, until cancelled."""
        idle_since_s = self._clock()
        while True:
            if not self.executor.num_plans_waiting:
                self._plans_arrived.clear()
                await self._plans_arrived.wait()
                continue
            epoch = self.executor.epoch
            idle_s = self._clock() - idle_since_s
            await asyncio.sleep(self.executor.next_step_ns() * self.time_scale / 1e9)
            if self.executor.epoch == epoch and self._holder is not None:
                self._run_step(self._holder, round(idle_s * 1e9))
            elif self._holder is None:
                self.executor.drop_waiting()
            idle_since_s = self._clock()

    def _run_step(self, holder: Stream, idle_ns: int) -> None:
        try:
            result = self.executor.run_next()
            holder.outbox.put_nowait(replace(result, timings=replace(result.timings, idle_ns=idle_ns)))
        except PlanViolationError as error:
            self._violated(holder, error)

    def _accept(self, stream: Stream) -> None:
        if self._holder is not None:
            self._end(self._holder, StreamEnd.REPLACED, f"by {stream.scheduler_id}")
        if stream in self._line:
            self._line.remove(stream)
        self._holder, self._last_claim = stream, stream.claim
        description, snapshot = self.executor.attach("")
        stream.outbox.put_nowait(Accepted(description, snapshot))
        for waiting in [other for other in self._line if other.claim < stream.claim]:
            self._line.remove(waiting)
            self._end(waiting, StreamEnd.SUPERSEDED, "attach again with a higher term")

    def _violated(self, stream: Stream, error: PlanViolationError) -> None:
        self.violations.append(str(error))
        self._end(stream, StreamEnd.VIOLATION, str(error))
        if stream is self._holder:
            self._holder = None

    def _end(self, stream: Stream, end: StreamEnd, detail: str) -> None:
        stream.has_ended = True
        stream.outbox.put_nowait(Ended(end, detail, self._last_claim[1], self._last_claim[0]))

    def _is_silent(self, stream: Stream) -> bool:
        return self._clock() - stream.heard_s > LEASE_S

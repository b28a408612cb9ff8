"""One plan stream from hello to its end: who speaks when, and when silence or a stuck step ends it.

Refuses to know what a result means.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn, Protocol

from paceline.plan.values import (
    BatchPlan,
    Drain,
    Heartbeat,
    Hello,
    SnapshotPart,
    StepResult,
    ToExecutor,
    WaitingInLine,
    Welcome,
)
from paceline.plan.versions import GROUPING_PROTOCOL, PROTOCOLS
from paceline_scheduler.core.executor.attachment import StepInFlight
from paceline_scheduler.core.executors import Snapshot
from paceline_scheduler.errors import DivergenceError, LateStepError, LinkError, StreamEndedError
from paceline_scheduler.link.snapshots import SnapshotJoiner
from paceline_scheduler.link.transport import PlanCall

HEARTBEAT_S = 0.2
MAX_SILENCE_S = 1.2
MIN_STEP_BOUND_S = 1.2
STEP_BOUND_FACTOR = 2.4
MAX_WELCOME_S = MIN_STEP_BOUND_S + MAX_SILENCE_S  # a step that runs may end first
# With more than this the network takes nothing.
MAX_OUTBOX = 64


class StreamEvents(Protocol):
    """Calls are made on the event loop and must not block."""

    def waits_in_line(self, notice: WaitingInLine) -> None: ...

    async def accepted(self, welcome: Welcome, snapshot: Snapshot) -> None:
        """The executor is as in the snapshot. Plans may be sent when this returns."""
        ...

    def going_away(self, notice: Drain) -> None: ...


@dataclass(frozen=True, slots=True)
class StepCallbacks:
    """`finish` raises DivergenceError when the result fits no plan; `due` is the oldest plan without one."""

    finish: Callable[[StepResult], None]
    due: Callable[[], StepInFlight | None]


class StreamPhase(Enum):
    GREETING = "greeting"
    IN_LINE = "queued"
    SNAPSHOT = "snapshot"
    READY = "ready"


@dataclass(slots=True)
class _PeerTimes:
    at_s: float
    progressed_at_s: float  # more than a heartbeat
    awaited_since_s: float = 0.0  # the oldest plan began then at the latest
    patience: float = 1.0  # how many times its bound a step may take

    def excuse(self, standstill_s: float, now_s: float) -> None:
        """This process stood still: messages of that time are not read yet, and what held us up may have held up the
        executor too.
        """
        self.at_s = min(now_s, self.at_s + standstill_s)
        self.progressed_at_s = min(now_s, self.progressed_at_s + standstill_s)
        self.awaited_since_s = min(now_s, self.awaited_since_s + standstill_s)


class PlanStream:
    """Its end is always an error."""

    def __init__(
        self, stream: PlanCall, events: StreamEvents, steps: StepCallbacks, clock: Callable[[], float]
    ) -> None:
        self._stream = stream
        self._events = events
        self._steps = steps
        self._clock = clock
        self._phase = StreamPhase.GREETING
        self._protocols = PROTOCOLS
        self._protocol = PROTOCOLS.lowest  # the executor picks one
        self._outbox: deque[ToExecutor] = deque()
        self._wake_writer = asyncio.Event()
        self._snapshot: SnapshotJoiner | None = None
        self._welcome: Welcome | None = None
        self._accepting = asyncio.Event()
        self._accepted_snapshot = Snapshot()
        self._peer = _PeerTimes(clock(), clock())
        self._failure: asyncio.Future[NoReturn] = asyncio.get_running_loop().create_future()

    async def run(self, hello: Hello) -> NoReturn:
        """Raises why the stream ended."""
        self._protocols = hello.protocols
        self._send(hello)
        await _run_until_one_ends(
            self._read_loop(), self._write_loop(), self._accept(), self._beat_loop(), self._wait_for_failure()
        )

    def fail(self, error: LinkError) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    def set_patience(self, patience: float) -> None:
        self._peer.patience = patience

    @property
    def is_ending(self) -> bool:
        return self._failure.done()

    def send_plan(self, plan: BatchPlan) -> None:
        """Does not wait for the network."""
        step = self._steps.due()
        if step is not None and step.step_id == plan.step_id:
            self._peer.awaited_since_s = self._clock()
        self._send(plan)

    def _send(self, message: ToExecutor) -> None:
        self._outbox.append(message)
        self._wake_writer.set()

    async def _write_loop(self) -> NoReturn:
        """A plan takes those behind it along that place nothing: prompts may fill a message."""
        while True:
            while self._outbox:
                message, more = self._outbox.popleft(), list[BatchPlan]()
                if isinstance(message, BatchPlan) and not message.new_requests and self._protocol >= GROUPING_PROTOCOL:
                    while self._outbox and isinstance(plan := self._outbox[0], BatchPlan) and not plan.new_requests:
                        more.append(plan)
                        self._outbox.popleft()
                await self._stream.write(message, *more)
            self._wake_writer.clear()
            await self._wake_writer.wait()

    async def _wait_for_failure(self) -> NoReturn:
        await self._failure
        raise AssertionError("a failure is an exception")

    async def _read_loop(self) -> NoReturn:
        while True:
            message = await self._stream.read()
            self._peer.at_s = self._clock()
            if not isinstance(message, Heartbeat):
                self._peer.progressed_at_s = self._peer.at_s
            match message:
                case StepResult():
                    self._require_phase(StreamPhase.READY)
                    self._peer.awaited_since_s = self._peer.at_s
                    self._steps.finish(message)
                case Heartbeat():
                    pass
                case SnapshotPart():
                    self._take_snapshot(message)
                case Welcome():
                    self._take_welcome(message)
                case WaitingInLine():
                    self._require_phase(StreamPhase.GREETING, StreamPhase.IN_LINE)
                    self._phase = StreamPhase.IN_LINE
                    self._events.waits_in_line(message)
                case Drain():
                    self._events.going_away(message)

    def _take_welcome(self, welcome: Welcome) -> None:
        self._require_phase(StreamPhase.GREETING, StreamPhase.IN_LINE)
        if welcome.protocol not in self._protocols:
            raise DivergenceError(f"the executor picked protocol {welcome.protocol}, not one of {self._protocols}")
        self._phase, self._welcome, self._protocol = StreamPhase.SNAPSHOT, welcome, welcome.protocol
        self._snapshot = SnapshotJoiner(welcome)

    def _take_snapshot(self, part: SnapshotPart) -> None:
        self._require_phase(StreamPhase.SNAPSHOT)
        assert self._snapshot is not None, "the welcome begins this phase"
        snapshot = self._snapshot.add(part)
        if snapshot is not None:
            self._phase = StreamPhase.READY
            self._accepted_snapshot = snapshot
            self._accepting.set()

    def _require_phase(self, *allowed: StreamPhase) -> None:
        if self._phase not in allowed:
            raise DivergenceError(f"the executor sent a message out of turn, in phase {self._phase.value!r}")

    async def _accept(self) -> NoReturn:
        """Fetching its tokenizer may take longer than a silence: the reader goes on meanwhile."""
        await self._accepting.wait()
        assert self._welcome is not None, "the snapshot follows the welcome"
        await self._events.accepted(self._welcome, self._accepted_snapshot)
        await never()

    async def _beat_loop(self) -> NoReturn:
        while True:
            slept_from_s = self._clock()
            await asyncio.sleep(HEARTBEAT_S)
            now_s = self._clock()
            if len(self._outbox) > MAX_OUTBOX:
                raise StreamEndedError("the executor takes no more messages")
            self._send(Heartbeat())
            if (standstill_s := now_s - slept_from_s - HEARTBEAT_S) > 0:
                self._peer.excuse(standstill_s, now_s)
            self._check_alive(now_s)

    def _check_alive(self, now_s: float) -> None:
        peer = self._peer
        if now_s - peer.at_s > MAX_SILENCE_S:
            raise StreamEndedError(f"the executor has sent nothing for {now_s - peer.at_s:.1f} s")
        if self._phase in (StreamPhase.GREETING, StreamPhase.SNAPSHOT) and now_s - peer.progressed_at_s > MAX_WELCOME_S:
            raise StreamEndedError(
                f"the executor sent no welcome or no more of its snapshot for {now_s - peer.progressed_at_s:.1f} s"
            )
        step = self._steps.due()
        if step is not None and (waited_s := now_s - peer.awaited_since_s) > peer.patience * _bound_s(step):
            raise LateStepError(f"step {step.step_id} has taken {waited_s:.1f} s, longer than its bound")


def _bound_s(step: StepInFlight) -> float:
    """Beyond this the executor counts as stuck."""
    return max(MIN_STEP_BOUND_S, STEP_BOUND_FACTOR * step.predicted_ns / 1e9)


async def never() -> NoReturn:
    await asyncio.Event().wait()
    raise AssertionError("nobody sets this event")


async def _run_until_one_ends(*coroutines: Coroutine[Any, Any, NoReturn]) -> NoReturn:
    """The others are cancelled before it raises. Of several at once the first one given counts."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        ended = [task for task in tasks if task.done()]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    ended[0].result()
    raise AssertionError("an endless task returned")

"""The plan streams of an executor: lets the fence decide, does what it says, carries plans in and results out.

Refuses to know gRPC and protobuf (`SchedulerConnection` carries messages), and what is in a plan. Everything here runs
on the event loop.

Acceptance goes in this order: the fence raises the epoch; the old stream ends; plans that are queued but not launched
are dropped; the running step finishes within its bound; welcome and the snapshot of that boundary are sent; then the
first plan may come.
"""

import asyncio
import hashlib
import itertools
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from paceline.plan.values import Approach, BatchPlan, Drain, Heartbeat, Hello, StepResult, WaitingInLine, Welcome
from paceline.plan.versions import PROTOCOLS, ProtocolRange
from paceline_executor.errors import (
    AttachError,
    EpochEndedError,
    ExecutorDrainingError,
    NotReadyError,
    ProtocolError,
    ServiceError,
    StepWedgedError,
)
from paceline_executor.link.fence import Accepted, Fence, FenceTimes, Refused, Verdict, Waits
from paceline_executor.link.plan_stream import SchedulerConnection, SchedulerStream
from paceline_executor.link.step_loop import MIN_STEP_BOUND_NS, Report, StepLoop, StepRefused
from paceline_executor.rows.snapshot import RowSnapshot, parts_of
from paceline_executor.rows.table import RowTable

MAX_PART_BYTES = 1024 * 1024
_NANOSECONDS = 1_000_000_000
_HELLO_S = 5.0
_FROZEN_NS = 600_000_000  # beats come every 0.2 s; after such a gap this process itself had stood still
_TIMER_SLACK_S = 0.001  # timers fire up to a clock tick early


@dataclass(frozen=True, slots=True)
class Identity:
    """`tag_key` is kept for the deployment's block tags."""

    incarnation: int
    tag_key: bytes
    started_ns: int

    @staticmethod
    def new() -> "Identity":
        return Identity(secrets.randbits(64), secrets.token_bytes(32), time.monotonic_ns())

    @property
    def tag_key_digest(self) -> bytes:
        """Uses BLAKE2b-128."""
        return hashlib.blake2b(self.tag_key, digest_size=16).digest()


class PlanStreams:
    """At most one drives, the others wait."""

    def __init__(
        self,
        identity: Identity,
        max_plans_in_flight: int,
        times: FenceTimes,
        protocols: ProtocolRange = PROTOCOLS,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        max_part_bytes: int = MAX_PART_BYTES,
    ) -> None:
        self._max_part_bytes = max_part_bytes
        self.identity = identity
        self.max_plans_in_flight = max_plans_in_flight
        self.protocols = protocols
        self._clock_ns = clock_ns
        self.fence = Fence(times)
        self.drain_notice: Drain | None = None
        self._steps: StepLoop | None = None
        self._welcome: Welcome | None = None
        self._streams: dict[int, SchedulerStream] = {}
        self._driver: SchedulerStream | None = None
        self._tag_key_digest = identity.tag_key_digest
        self._stream_ids = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None
        self._last_beat_ns = clock_ns()

    @property
    def is_idle(self) -> bool:
        return self._driver is None or self._driver.num_in_flight == 0

    @property
    def uptime_ns(self) -> int:
        return self._clock_ns() - self.identity.started_ns

    def open(self, steps: StepLoop, welcome: Welcome) -> None:
        """Schedulers are told this; epoch and protocol are each stream's own."""
        self._steps, self._welcome = steps, welcome

    async def serve(self, transport: SchedulerConnection) -> None:
        """Raises the error to end the call with; returns for an end in good order."""
        hello = await self._receive_hello(transport)
        if self._steps is None:
            raise NotReadyError("the model is still loading; wait until the health service says SERVING")
        protocol = _pick_protocol(self.protocols, hello.protocols)
        stream_id = next(self._stream_ids)
        stream = SchedulerStream(
            stream_id, hello, protocol, transport, self.identity.incarnation, self.max_plans_in_flight
        )
        self._streams[stream_id] = stream
        read = asyncio.create_task(self._read(stream, transport), name="attach-read")
        try:
            approach = Approach.TAKE_OVER if hello.takeover else Approach.WAIT
            self._act(self.fence.arrive(stream_id, hello.claim, approach, self._now_ns()))
            await stream.run(read)
        finally:
            self._forget(stream)

    def beat(self) -> None:
        """Call it every 0.2 s."""
        running = None if self._steps is None else self._steps.running
        now_ns = self._last_beat_ns = self._now_ns()
        heartbeat = Heartbeat(running.step_id, now_ns - running.started_ns) if running else Heartbeat()
        for stream in self._streams.values():
            stream.post_heartbeat(heartbeat)
        self._act(self.fence.advance(now_ns))

    def report(self, report: Report) -> None:
        """If the stream it came from still drives."""
        driver = self._driver
        if isinstance(report, StepRefused) and report.failed is not None and self._welcome is not None:
            # Whoever attaches next is told: how a stream ended may get lost.
            self._welcome = replace(self._welcome, failed_step=report.failed)
        match report:
            case StepResult(epoch=epoch) if driver is not None and driver.epoch == epoch:
                driver.answer(report)
            case StepRefused(epoch=epoch, error=error) if driver is not None and driver.epoch == epoch:
                driver.end(error)

    def drain(self, notice: Drain) -> None:
        """Schedulers that come later are told, too."""
        self.drain_notice = notice
        for stream in self._streams.values():
            stream.post(notice)

    def end_all(self, reason: str) -> None:
        for stream in list(self._streams.values()):
            stream.end(ExecutorDrainingError(f"{reason}; use another one"))

    async def _receive_hello(self, transport: SchedulerConnection) -> Hello:
        try:
            hello = await asyncio.wait_for(transport.receive(), _HELLO_S)
        except TimeoutError:
            raise AttachError(f"no hello came within {_HELLO_S:g} s") from None
        if not isinstance(hello, Hello):
            raise AttachError("the first message of a plan stream must be hello")
        return hello

    async def _read(self, stream: SchedulerStream, transport: SchedulerConnection) -> None:
        while (message := await transport.receive()) is not None:
            if isinstance(message, Hello):
                raise AttachError("a stream must have one hello, as its first message")
            self._act(self.fence.note_message(stream.stream_id, self._now_ns()))
            if isinstance(message, BatchPlan):
                stream.take(message)
                self._require_steps().submit(message)

    def _act(self, verdicts: tuple[Verdict, ...]) -> None:
        for verdict in verdicts:
            stream = self._streams.get(verdict.stream_id)
            match verdict:
                case Accepted() if stream is not None:
                    self._accept(stream, verdict)
                case Waits(holder=holder) if stream is not None:
                    stream.post(WaitingInLine(holder))
                case Refused(error=error) if stream is not None:
                    stream.end(error)
        self._wake_at(self.fence.next_change_ns())

    def _accept(self, stream: SchedulerStream, accepted: Accepted) -> None:
        displaced = self._streams.get(accepted.displaced_stream_id or 0)
        if displaced is not None:
            displaced.end(EpochEndedError(f"epoch {displaced.epoch} has ended: another Attach was accepted"))
            displaced.stop_greeting()
        self._driver = None
        self._require_steps().begin_epoch(accepted.epoch)
        stream.greeting = asyncio.create_task(self._greet(stream, accepted.epoch), name="attach-greet")

    async def _greet(self, stream: SchedulerStream, epoch: int) -> None:
        try:
            snapshot = await self._snapshot(stream.hello)
            assert self._welcome is not None, "schedulers are accepted once the model is loaded"
            welcome = replace(self._welcome, epoch=epoch, protocol=stream.protocol)
            await stream.put(welcome)
            for part in parts_of(snapshot, self._max_part_bytes):
                await stream.put(part)
        except ServiceError as error:
            stream.end(error)
            return
        except Exception as error:
            stream.fail(error)
            return
        if self.fence.epoch != epoch:
            return
        stream.epoch = epoch
        self._driver = stream
        if self.drain_notice is not None:
            stream.post(self.drain_notice)

    async def _snapshot(self, hello: Hello) -> RowSnapshot:
        steps = self._require_steps()
        running = steps.running
        now_ns = self._clock_ns()
        # One more step may have been launched between the two.
        bound_ns = MIN_STEP_BOUND_NS + max(0, steps.bound_ns - now_ns)
        digest = hello.tag_key_digest or self.identity.tag_key_digest
        keeps_tags = digest == self._tag_key_digest

        def take(table: RowTable) -> RowSnapshot:
            table.begin_epoch()
            table.trim_records(self._clock_ns())
            if not keeps_tags:
                table.clear_tags()
            return RowSnapshot(table.states(), table.tags())

        try:
            snapshot = await asyncio.wait_for(steps.ask(take), bound_ns / _NANOSECONDS)
        except TimeoutError:
            name = f"step {running.step_id}" if running else "a step"
            raise StepWedgedError(
                f"{name} does not end, so no scheduler can take this executor over; restart it if it stays so"
            ) from None
        self._tag_key_digest = digest
        return snapshot

    def _forget(self, stream: SchedulerStream) -> None:
        del self._streams[stream.stream_id]
        stream.stop_greeting()
        if self._driver is stream:
            self._driver = None
            self._require_steps().begin_epoch(0)
        self._act(self.fence.leave(stream.stream_id, self._now_ns()))

    def _wake_at(self, when_ns: int | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        delay_ns = 0 if when_ns is None else when_ns - self._clock_ns()
        if delay_ns > 0:
            self._timer = asyncio.get_running_loop().call_later(delay_ns / _NANOSECONDS + _TIMER_SLACK_S, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._act(self.fence.advance(self._now_ns()))

    def _now_ns(self) -> int:
        """A standstill of this process is nobody's silence."""
        now_ns = self._clock_ns()
        if now_ns - self._last_beat_ns > _FROZEN_NS:
            self.fence.renew(now_ns)
            self._last_beat_ns = now_ns
        return now_ns

    def _require_steps(self) -> StepLoop:
        if self._steps is None:
            raise NotReadyError("the model is still loading")
        return self._steps


def _pick_protocol(ours: ProtocolRange, theirs: ProtocolRange) -> int:
    protocol = ours.highest_in_common(theirs)
    if protocol is None:
        older = "executor" if ours.highest < theirs.highest else "scheduler"
        raise ProtocolError(f"this executor speaks protocol {ours}, the scheduler {theirs}; upgrade the {older}")
    return protocol

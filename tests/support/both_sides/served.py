"""Executors as processes on the running loop and in its time: links and rows as in production, without gRPC.

Knows how the parts of an executor are put together, as its process does it. A process can die and come back.
"""

import asyncio
from typing import Any, cast

import grpc.aio

from both_sides.audited import AuditedRows, Kind
from both_sides.executor import TAG_KEY, WithRows
from paceline.plan.codec.tokenizers import TokenizerParts
from paceline.plan.values import (
    BatchPlan,
    Claim,
    Drain,
    ExecutorInfo,
    FromExecutor,
    Hello,
    RecordId,
    StepResult,
    ToExecutor,
)
from paceline.plan.versions import PROTOCOLS
from paceline.process.statuses import rpc_status
from paceline.v1 import executor_pb2
from paceline_executor.errors import (
    AttachError,
    PlanError,
    PlanOrderError,
    ServiceError,
    StaleEpochError,
    TooManyPlansError,
)
from paceline_executor.link.fence import Fence, FenceTimes
from paceline_executor.link.plan_streams import Identity, PlanStreams
from paceline_executor.link.profiles import Profiles
from paceline_executor.link.servicer import ExecutorServicer
from paceline_executor.link.status import describe
from paceline_executor.link.step_loop import StepLoop
from paceline_scheduler.errors import LinkError, StreamEndedError
from paceline_scheduler.link import wire
from paceline_scheduler.link.wire_contexts import with_contexts
from simulation.device import NANOSECONDS, InlineThread

_BEAT_S = 0.2
_BREACHES = (StaleEpochError, PlanOrderError, TooManyPlansError, PlanError, AttachError)
_NO_CONTEXT = cast("grpc.aio.ServicerContext[Any, Any]", None)


class MemoryCall:
    """One plan stream: a PlanStream to its scheduler, a Transport to its executor."""

    def __init__(self, server: "ServedExecutor") -> None:
        self.claim: Claim | None = None  # of the scheduler, once it has said hello
        self._server = server
        self._to_executor: asyncio.Queue[ToExecutor] = asyncio.Queue()
        self._to_scheduler: asyncio.Queue[FromExecutor | LinkError] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._has_ended = False

    # The scheduler's end

    async def write(self, message: ToExecutor, *more: BatchPlan) -> None:
        """Give messages to the executor; after the end they are lost, and while it is frozen."""
        if not self._server.thawed.is_set():
            return
        if isinstance(message, Hello):
            self.claim = message.claim
            self._task = self._server.serve(self)
        for each in (message, *more):
            self._to_executor.put_nowait(with_contexts(each) if isinstance(each, BatchPlan) else each)

    async def read(self) -> FromExecutor:
        """Return the executor's next message; raises the LinkError by which the stream ends."""
        message = await self._to_scheduler.get()
        if isinstance(message, LinkError):
            raise message
        await self._server.thawed.wait()
        return message

    def cancel(self) -> None:
        self.cut(StreamEndedError("the plan stream was cancelled"))

    # The executor's end

    async def receive(self) -> ToExecutor:
        message = await self._to_executor.get()
        if isinstance(message, BatchPlan):
            self._server.hear(message)
        return message

    async def send(self, message: FromExecutor, *more: StepResult) -> None:
        for each in (message, *more):
            self._to_scheduler.put_nowait(each)

    def end(self, error: LinkError) -> None:
        """Say nothing more but why."""
        if not self._has_ended:
            self._has_ended = True
            self._to_scheduler.put_nowait(error)

    def cut(self, error: LinkError) -> None:
        self.end(error)
        if self._task is not None:
            self._task.cancel()


class ServedExecutor(WithRows):
    """One executor, which serves from the beginning. `time_scale` stretches its steps.

    `violations` are the rules that schedulers broke; steps with requests that are `failing` fail.
    """

    table: AuditedRows

    def __init__(self, kind: Kind, incarnation: int, max_plans_in_flight: int = 4) -> None:
        self.time_scale = 1.0
        self.failing: set[RecordId] = set()
        self.violations: list[str] = []
        self.thawed = asyncio.Event()  # cleared while the executor is frozen
        self.thawed.set()
        self._kind = kind
        self._max_plans_in_flight = max_plans_in_flight
        self._loop = asyncio.get_running_loop()
        self._begin(incarnation)

    @property
    def fence(self) -> Fence:
        return self._plan_streams.fence

    @property
    def holder_scheduler_id(self) -> str:
        """Who drives; empty when nobody does."""
        holder = self.fence.holder
        return holder.scheduler_id if holder else ""

    @property
    def epoch(self) -> int:
        return self.fence.epoch

    @property
    def num_steps(self) -> int:
        return self.table.num_landed

    def drain(self, reason: str) -> None:
        """Tell every scheduler, and those still to come, that this executor is going away."""
        self._plan_streams.drain(Drain(reason))

    def break_stream(self) -> None:
        """Let the driver's stream break, as a network does."""
        for call in list(self._calls):
            if call.claim == self.fence.holder:
                call.cut(StreamEndedError("cut by the test"))

    def stop(self) -> None:
        for call in list(self._calls):
            call.cut(StreamEndedError("the executor died"))
        self._life.cancel()
        self._thread.cancel()

    def restart(self) -> None:
        """Die and come back as another incarnation that knows nothing."""
        self.stop()
        self._begin(self._plan_streams.identity.incarnation + 1)

    def serve(self, call: MemoryCall) -> asyncio.Task[None]:
        self._calls.add(call)
        return self._loop.create_task(self._serve(call))

    def hear(self, plan: BatchPlan) -> None:
        self.table.audit.arrives(plan, self.table)

    async def get_info(self) -> ExecutorInfo:
        await self._opened.wait()
        info = await self._servicer.GetInfo(executor_pb2.GetInfoRequest(), _NO_CONTEXT)
        return wire.decode_info(info.SerializeToString())

    async def get_tokenizer(self) -> bytes:
        await self._opened.wait()
        parts = TokenizerParts()
        async for part in self._servicer.GetTokenizer(executor_pb2.GetTokenizerRequest(), _NO_CONTEXT):
            wire.add_tokenizer_part(parts, part.SerializeToString())
        return parts.content()

    def _begin(self, incarnation: int) -> None:
        self.table = AuditedRows(self._kind, self.failing, {}, self.violations, self._step_ns, self._now_ns)
        identity = Identity(incarnation, TAG_KEY, self._now_ns())
        self._plan_streams = PlanStreams(identity, self._max_plans_in_flight, FenceTimes(), PROTOCOLS, self._now_ns)
        self._servicer = ExecutorServicer(self._plan_streams, Profiles(lambda _: None))
        self._thread = InlineThread(self._now_ns, self.table.device.end_of)
        self._calls: set[MemoryCall] = set()
        self._opened = asyncio.Event()
        self._life = self._loop.create_task(self._live())

    async def _live(self) -> None:
        attachments, opened, loaded = self._plan_streams, self._opened, self.table.loaded
        steps = StepLoop(lambda: loaded, attachments.report, self._now_ns, self._thread)
        self._servicer.open(steps, await steps.start())
        opened.set()
        while not steps.ended.done():
            attachments.beat()
            await asyncio.wait((steps.ended,), timeout=_BEAT_S)
        self.violations.append(f"the executor ended: {steps.ended.exception()!r}")

    async def _serve(self, call: MemoryCall) -> None:
        calls, attachments = self._calls, self._plan_streams
        try:
            await self._opened.wait()
            await attachments.serve(call)
            call.end(StreamEndedError("the executor closed the plan stream"))
        except ServiceError as error:
            if isinstance(error, _BREACHES):
                self.violations.append(str(error))
            status = rpc_status(describe(error))
            call.end(wire.decode_refusal(status.message, status.SerializeToString()))
        except Exception as error:
            self.violations.append(repr(error))
            raise
        finally:
            calls.discard(call)

    def _step_ns(self, num_tokens: int) -> int:
        return round(self._kind.step_times.step_ns(num_tokens, 0) * self.time_scale)

    def _now_ns(self) -> int:
        return round(self._loop.time() * NANOSECONDS)

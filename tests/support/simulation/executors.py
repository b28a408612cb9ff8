"""Executors as nodes of the network: the production's link and rows on a device that hashes; they die and come back.

Knows how the parts of an executor are put together, as its process does it, and who answers which call.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any, cast

import grpc.aio

from executor_rig.hash_runner import HashRule
from executor_rig.hiding_runner import HidingRunner
from paceline.bytes_tokenizer import END_TOKEN_IDS
from paceline.plan.values import (
    BatchPlan,
    Claim,
    Drain,
    FromExecutor,
    Hello,
    RecordId,
    RowState,
    StepResult,
    ToExecutor,
    Welcome,
)
from paceline.plan.versions import ProtocolRange
from paceline.v1 import executor_pb2
from paceline_executor.errors import (
    AttachError,
    DeviceError,
    EpochEndedError,
    PlanError,
    PlanOrderError,
    ServiceError,
    StaleEpochError,
    TooManyPlansError,
)
from paceline_executor.link.description import Description, Loaded
from paceline_executor.link.engine import Engine
from paceline_executor.link.fence import FenceTimes
from paceline_executor.link.plan_streams import MAX_PART_BYTES, Identity, PlanStreams
from paceline_executor.link.profiles import Profiles
from paceline_executor.link.servicer import ExecutorServicer, GrpcSchedulerConnection
from paceline_executor.link.servicer_views import look_at
from paceline_executor.link.status import describe
from paceline_executor.link.step_loop import StepLoop
from paceline_executor.rows.forms import FormMasker
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.interface import Runner
from paceline_executor.start.opening import simulated_tokenizer
from simulation.audit import AuditedTable, PlanAudit
from simulation.device import NANOSECONDS, InlineThread, SlotRunner, TimedRunner
from simulation.drafting import HashDrafter, keys_in
from simulation.forms import SlowThread
from simulation.invariants import ExecutorChecks
from simulation.loop import keep_failure
from simulation.model import MAX_PLANS_IN_FLIGHT, ModelConfig
from simulation.network import Call, CallEndedError, Host, Site

ATTACH = "Attach"
GET_INFO = "GetInfo"
GET_TOKENIZER = "GetTokenizer"
_TICK_S = 0.2
_LOOK_S = 0.05
_GOODBYE_S = 0.05
_LOADING_S = (0.0, 0.0, 0.02, 0.3)
_PART_BYTES = (MAX_PART_BYTES, 900)  # the less is too little for a longer request
_NOBODY = Claim(0, "")
_TWIN_STEPS = 3  # two in flight, and the one that is about to be
_BREACHES = (StaleEpochError, PlanOrderError, TooManyPlansError)  # of what is malformed others tell


@dataclass(frozen=True, slots=True)
class _Sent:
    """A plan and who sent it, and how."""

    plan: BatchPlan
    claim: Claim
    is_excused: bool


class _Process:
    """One executor process, and what is watched of it. To be made on its node."""

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        protocols: ProtocolRange,
        random: Random,
        checks: ExecutorChecks,
        failing: set[RecordId],
    ) -> None:
        self._name = name
        self._checks = checks
        self._sent: dict[int, _Sent] = {}  # by identity of the plan
        # The last ones: as many as a step that reads may be behind.
        self._launched: deque[BatchPlan] = deque(maxlen=_TWIN_STEPS if config.is_twin else 1)
        clock_ns = _clock_of(asyncio.get_running_loop())
        identity = Identity(random.getrandbits(63) | 1, random.randbytes(32), clock_ns())
        self.plan_streams = PlanStreams(
            identity, MAX_PLANS_IN_FLIGHT, FenceTimes(), protocols, clock_ns, random.choice(_PART_BYTES)
        )
        limits = config.limits
        seed = random.getrandbits(32)
        accepting = Random(seed)  # noqa: S311 - nothing secret

        def num_right(num_drafts: int) -> int:
            return accepting.randint(0, num_drafts)

        slots = SlotRunner(limits.num_blocks, limits.block_size, config.rule, self._report)
        slots.draft_by(HashDrafter(config.rule, num_right, keys_in(slots)))
        inner = _as_seen(slots, config, seed, num_right)
        self.device = device = TimedRunner(inner, config.step_ns, clock_ns, config.failure)
        self._audit = PlanAudit(limits, self._violated)
        pool = SlowThread(asyncio.get_running_loop(), Random(f"forms {seed}"))  # noqa: S311 - nothing secret
        forms = FormMasker(simulated_tokenizer().tokenizer_json, END_TOKEN_IDS, limits.vocab_size, pool)
        self.table: RowTable = AuditedTable(limits, self._audit, slots, device, self._applied, failing, forms)
        loaded = Loaded(Engine(self.table, device, clock_ns), replace(config.describe(device), forms=forms))
        thread = InlineThread(clock_ns, device.end_of)
        self.steps = StepLoop(lambda: loaded, self.plan_streams.report, clock_ns, thread)
        self.servicer = ExecutorServicer(self.plan_streams, Profiles(lambda _: None))

    @property
    def incarnation(self) -> int:
        return self.plan_streams.identity.incarnation

    async def run(self, loading_s: float) -> None:
        """Load, then beat until the steps come to an end; raises what ended them."""
        await asyncio.sleep(loading_s)
        description: Description = await self.steps.start()
        self.servicer.open(self.steps, description)
        while not self.steps.ended.done():
            self.plan_streams.beat()
            await asyncio.wait((self.steps.ended,), timeout=_TICK_S)
        error = self.steps.ended.exception()
        self.plan_streams.end_all(f"the executor has failed and ends: {error}")
        await asyncio.sleep(_GOODBYE_S)
        self.steps.ended.result()

    async def watch(self) -> None:
        """Look at the rows again and again, as somebody does who waits until they are free."""
        while not self.steps.ended.done():
            await self.steps.ask(look_at)
            await asyncio.sleep(_LOOK_S)

    async def attach(self, call: Call) -> None:
        transport = _WatchedTransport(call, self)
        is_displaced = False
        try:
            await self.plan_streams.serve(transport)
        except EpochEndedError:
            is_displaced = True
            raise
        except _BREACHES as error:
            self.breaks(error, is_excused=transport.is_excused)
            raise
        finally:
            if transport.hello is not None and not is_displaced:
                self._checks.left(self._name, self.incarnation, transport.hello.claim)

    def welcomes(self, hello: Hello, welcome: Welcome) -> None:
        claim, epoch = hello.claim, welcome.epoch
        self._checks.accepted(self._name, self.incarnation, claim, epoch, is_takeover=hello.takeover)

    def breaks(self, error: ServiceError, *, is_excused: bool) -> None:
        self._checks.violated(self._name, str(error), is_excused=is_excused)

    def hears(self, hello: Hello, message: ToExecutor, call: Call) -> None:
        self._checks.heard(self._name, self.incarnation, hello.claim)
        if isinstance(message, BatchPlan):
            self._sent[id(message)] = _Sent(message, hello.claim, call.num_excused_plans > 0)
            self._audit.arrives(message, self.table)
            call.num_excused_plans -= 1

    def _applied(self, plan: BatchPlan) -> None:
        self._launched.append(plan)
        sent = self._sent.get(id(plan))
        claim = _NOBODY if sent is None else sent.claim
        self._checks.applied(self._name, self.incarnation, plan, self.plan_streams.fence.epoch, claim)

    def _violated(self, plan: BatchPlan, sentence: str) -> None:
        sent = self._sent.get(id(plan))
        self._checks.violated(self._name, sentence, is_excused=sent is not None and sent.is_excused)

    def _report(self, sentence: str) -> None:
        sent = (self._sent.get(id(plan)) for plan in self._launched)
        excused = (each.plan for each in sent if each is not None and each.is_excused)
        self._violated(next(excused, self._launched[-1]), sentence)


class _CallContext:
    """A call of the simulated network, as the executor's servicer uses one of grpc.aio."""

    def __init__(self, call: Call) -> None:
        self._call = call

    async def read(self) -> object:
        try:
            return await self._call.question()
        except CallEndedError:
            return grpc.aio.EOF

    async def write(self, data: bytes) -> None:
        self._call.tell(data)

    def auth_context(self) -> dict[str, list[bytes]]:
        """Return what is known of the caller: nothing, as without TLS."""
        return {}


class _WatchedTransport(GrpcSchedulerConnection):
    """The production's transport of a plan stream, with somebody who listens."""

    def __init__(self, call: Call, process: _Process) -> None:
        super().__init__(cast("grpc.aio.ServicerContext[bytes, bytes]", _CallContext(call)))
        self.hello: Hello | None = None
        self.is_excused = False  # what was received last
        self._call = call
        self._process = process

    async def receive(self) -> ToExecutor | None:
        try:
            message = await super().receive()
        except (PlanError, AttachError) as error:
            self._process.breaks(error, is_excused=self._call.num_excused_plans > 0)
            raise
        self.is_excused = self._call.num_excused_plans > 0
        if self.hello is None:
            self.hello = message if isinstance(message, Hello) else None
        elif message is not None:
            self._process.hears(self.hello, message, self._call)
        return message

    async def send(self, message: FromExecutor, *more: StepResult) -> None:
        if isinstance(message, Welcome) and self.hello is not None:
            self._process.welcomes(self.hello, message)
        await super().send(message, *more)


class ExecutorHost(Host):
    """A host on which one executor process after another runs. `rules` are what they drew by, all of them so far.

    Steps with requests that are, or come to be, among `failing` fail. `on_ended` hears of a process that ends itself.
    """

    def __init__(
        self,
        site: Site,
        checks: ExecutorChecks,
        failing: set[RecordId],
        on_ended: Callable[["ExecutorHost"], None],
    ) -> None:
        super().__init__(site)
        self.rules: list[HashRule] = []
        self._process: _Process | None = None
        self._checks = checks
        self._failing = failing
        self._on_ended = on_ended

    def start(self, config: ModelConfig, protocols: ProtocolRange) -> None:
        node = self._next_node()
        self.rules.append(config.rule)

        def make() -> _Process:
            return _Process(self.name, config, protocols, self._random, self._checks, self._failing)

        process = self._process = self._loop.run_as(node, make)
        self._network.listen(node, self._serve)
        task = self._loop.spawn(node, process.run(self._random.choice(_LOADING_S)))
        task.add_done_callback(self._stopped)

    @property
    def num_tokens_ahead(self) -> int:
        """How many tokens the longest request may still get."""
        return max((row.max_tokens - row.output_token_ids.size for row in self._rows()), default=0)

    def runs(self, request_id: str) -> bool:
        return any(row.record_id.request_id == request_id for row in self._rows())

    def running_keys(self) -> tuple[RecordId, ...]:
        return tuple(row.record_id for row in self._rows())

    def stall(self, seconds: float) -> None:
        if self._process is not None:
            self._process.device.stall(seconds)

    def drain(self) -> None:
        assert self._process is not None, "there is one"
        self.is_draining = True
        process = self._process
        self._loop.run_as(self.node, lambda: process.plan_streams.drain(Drain("it is being upgraded")))
        self._loop.spawn(self.node, process.watch())

    def _rows(self) -> list[RowState]:
        states = () if self._process is None else self._process.table.states()
        return [state for state in states if state.row is not None]

    def _stopped(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and isinstance(task.exception(), DeviceError):
            self.kill()
            self._on_ended(self)
        else:
            keep_failure(task)

    async def _serve(self, call: Call) -> None:
        assert self._process is not None, "it listens while it runs"
        servicer, context = self._process.servicer, cast("grpc.aio.ServicerContext[Any, Any]", None)
        try:
            match call.method:
                case "GetInfo":
                    info = await servicer.GetInfo(executor_pb2.GetInfoRequest(), context)
                    call.tell(info.SerializeToString())
                case "GetTokenizer":
                    async for part in servicer.GetTokenizer(executor_pb2.GetTokenizerRequest(), context):
                        call.tell(part.SerializeToString())
                case "Attach":
                    await self._process.attach(call)
            call.finish()
        except ServiceError as error:
            call.finish(describe(error))


def _as_seen(slots: SlotRunner, config: ModelConfig, seed: int, num_right: Callable[[int], int]) -> Runner:
    if not config.is_twin:
        return HidingRunner(slots, seed) if config.is_ahead else slots
    from hash_twin import HostDrafter, TwinHashRunner

    drafter = HashDrafter(config.rule, num_right, lambda token_ids: twin.key_of(token_ids))
    on_device = HostDrafter(drafter, config.limits.vocab_size)
    twin = TwinHashRunner(slots, config.limits, drafter=on_device, reads=slots.reads)
    twin.device.late_by(seed)
    slots.in_order = twin.device.launch
    return twin


def _clock_of(loop: asyncio.AbstractEventLoop) -> Callable[[], int]:
    return lambda: round(loop.time() * NANOSECONDS)


def address_of(name: str) -> str:
    return f"{name}:1"

"""Simulated executors as nodes of the network: they start, die and come back, and they answer schedulers.

Knows the calls of an executor and how its messages look to a scheduler's link. The rules of plans are the simulator's.
"""

import asyncio
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from random import Random
from typing import Protocol

from paceline.plan.values import BatchPlan, Claim, Hello, Int32Array, ProtocolRange, RecordId, StepResult
from paceline_scheduler.errors import LinkError, StreamEndedError
from paceline_scheduler.simulator.config import SimulatorConfig
from paceline_scheduler.simulator.dialogue import TOKENIZER_SOURCE, greet, info_of, messages_of
from paceline_scheduler.simulator.executor import SimulatedExecutor
from paceline_scheduler.simulator.failures import SimulatedDeviceError
from paceline_scheduler.simulator.fence import NOBODY
from paceline_scheduler.simulator.service import Accepted, SimulatedService, Stream
from paceline_scheduler.simulator.tokens import TokenRule
from paceline_scheduler.simulator.violations import PlanViolationError
from simulation.loop import Node, SimulationLoop
from simulation.network import Call, CallEndedError, Network

ATTACH = "Attach"
GET_INFO = "GetInfo"
GET_TOKENIZER = "GetTokenizer"
END_TOKEN_IDS = TOKENIZER_SOURCE.end_token_ids


@dataclass(frozen=True, slots=True)
class SaltedRule(TokenRule):
    """A model of which every process draws other tokens, as one that is not reproducible may."""

    salt: int = 0

    def next_token(
        self, context: Int32Array, seed: int, offset: int, end_token_ids: Sequence[int], min_tokens: int = 0
    ) -> int:
        """Return the token at output index `offset` as this process draws it."""
        return TokenRule.next_token(self, context, seed ^ self.salt, offset, end_token_ids, min_tokens)


class ExecutorEvents(Protocol):
    """What is told of executors."""

    def heard(self, name: str, incarnation: int, claim: Claim) -> None:
        """A plan stream of a scheduler has brought something."""
        ...

    def left(self, name: str, incarnation: int, claim: Claim) -> None:
        """A plan stream has ended."""
        ...

    def accepted(self, name: str, incarnation: int, claim: Claim, epoch: int, *, is_takeover: bool) -> None:
        """A scheduler drives it from now on."""
        ...

    def applied(self, name: str, incarnation: int, plan: BatchPlan, epoch: int, claim: Claim) -> None:
        """A plan, which a scheduler sent under this claim, has an effect in this epoch."""
        ...

    def violated(self, name: str, sentence: str, *, is_excused: bool) -> None:
        """A plan broke a rule; `is_excused` if a fault may be why."""
        ...


@dataclass(frozen=True, slots=True)
class _Sender:
    """Who sent a plan, and how."""

    claim: Claim
    call: Call


class _WatchedExecutor(SimulatedExecutor):
    """One that tells which plans take effect, and which break a rule when they do."""

    def __init__(self, config: SimulatorConfig, incarnation: int, name: str, events: ExecutorEvents) -> None:
        super().__init__(config, incarnation)
        self.sender: _Sender | None = None  # of what is being received
        self._name = name
        self._events = events
        self._senders: dict[int, _Sender] = {}  # by step of this epoch

    def receive(self, plan: BatchPlan) -> None:
        """Take a plan in."""
        super().receive(plan)
        if self.sender is not None:
            self._senders[plan.step_id] = self.sender

    def run_next(self) -> StepResult:
        """Run the oldest waiting plan. One that breaks a rule because of a fault has no effect at all."""
        sender = self._senders.get(self.next_plan.step_id)
        is_excused = sender is not None and sender.call.num_excused_plans > 0
        before = deepcopy((self.rows, self.records, self.blocks)) if is_excused else None
        try:
            return super().run_next()
        except PlanViolationError as error:
            self._events.violated(self._name, str(error), is_excused=is_excused)
            if before is not None:
                self.rows, self.records, self.blocks = before
            raise

    def _change_state(self, plan: BatchPlan) -> None:
        sender = self._senders.get(plan.step_id)
        claim = NOBODY if sender is None else sender.claim
        self._events.applied(self._name, self.incarnation, plan, self.epoch, claim)
        super()._change_state(plan)


class ExecutorHost:
    """A host on which one executor process after another runs. `rules` are what they drew by, all of them so far.

    Steps with requests that are, or come to be, among `failing` fail. `on_ended` hears of a process that ends itself.
    """

    def __init__(
        self,
        name: str,
        loop: SimulationLoop,
        network: Network,
        random: Random,
        events: ExecutorEvents,
        failing: set[RecordId],
        on_ended: Callable[["ExecutorHost"], None],
    ) -> None:
        self.name = name
        self.node: Node | None = None
        self.service: SimulatedService | None = None
        self.is_draining = False
        self.rules: list[TokenRule] = []
        self._loop = loop
        self._network = network
        self._random = random
        self._events = events
        self._failing = failing
        self._on_ended = on_ended

    def start(self, config: SimulatorConfig, protocols: ProtocolRange) -> None:
        """Start a process."""
        assert self.node is None or self.node.is_dead, "one process at a time"
        self.node = self._loop.add_node(self.name)
        self.is_draining = False
        self.rules.append(config.tokens)
        incarnation = self._random.getrandbits(63) | 1
        executor = _WatchedExecutor(config, incarnation, self.name, self._events)
        executor.failing = self._failing
        self.service = SimulatedService(executor, self._loop.time, protocols=protocols)
        self._network.listen(self.node, self._serve)
        task = self._loop.spawn(self.node, self.service.run_steps())
        task.add_done_callback(self._stopped)

    @property
    def num_tokens_ahead(self) -> int:
        """How many tokens the longest request may still get."""
        rows = () if self.service is None else self.service.executor.rows.values()
        return max((row.placement.max_tokens - row.num_output_tokens for row in rows), default=0)

    def runs(self, request_id: str) -> bool:
        """Tell whether a request is on a row."""
        rows = () if self.service is None else self.service.executor.rows.values()
        return any(row.key.request_id == request_id for row in rows)

    def running_keys(self) -> tuple[RecordId, ...]:
        """Return what is on its rows, by row."""
        rows = {} if self.service is None else self.service.executor.rows
        return tuple(row.key for _, row in sorted(rows.items()))

    def drain(self) -> None:
        """Announce that the process goes away."""
        assert self.node is not None, "there is one"
        assert self.service is not None, "there is one"
        self.is_draining = True
        service = self.service
        self._loop.run_as(self.node, lambda: service.drain("it is being upgraded"))

    def kill(self) -> None:
        """End the process at once."""
        assert self.node is not None, "there is one"
        self._loop.kill(self.node)
        self._network.gone(self.node)

    def _stopped(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, ExceptionGroup) and error.split(SimulatedDeviceError)[1] is None:
            self.kill()
            self._on_ended(self)
        else:
            self._loop.failures.append(error)

    async def _serve(self, call: Call) -> None:
        assert self.service is not None, "it listens while it runs"
        match call.method:
            case "GetInfo":
                call.tell(info_of(self.service))
                call.finish()
            case "GetTokenizer":
                call.tell(TOKENIZER_SOURCE)
                call.finish()
            case "Attach":
                await self._attach(call, self.service)

    async def _attach(self, call: Call, service: SimulatedService) -> None:
        hello = await call.question()
        if not isinstance(hello, Hello):
            call.finish(StreamEndedError("a stream begins with hello"))
            return
        stream = greet(service, hello)
        reader = asyncio.create_task(self._read(call, service, stream))
        try:
            while True:
                outgoing = await stream.outbox.get()
                if isinstance(outgoing, Accepted):
                    incarnation, epoch = outgoing.description.incarnation, outgoing.description.epoch
                    self._events.accepted(self.name, incarnation, stream.claim, epoch, is_takeover=hello.takeover)
                for message in messages_of(service, outgoing):
                    call.tell(message)
        except LinkError as end:
            call.finish(end)
        finally:
            reader.cancel()
            self._events.left(self.name, service.executor.incarnation, stream.claim)
            service.leave(stream)

    async def _read(self, call: Call, service: SimulatedService, stream: Stream) -> None:
        executor = service.executor
        assert isinstance(executor, _WatchedExecutor), "start() made it"
        while True:
            try:
                message = await call.question()
            except CallEndedError:
                return
            self._events.heard(self.name, executor.incarnation, stream.claim)
            executor.sender = _Sender(stream.claim, call)
            if not isinstance(message, BatchPlan):
                service.hear(stream, None)
                continue
            num_violations = len(service.violations)
            service.hear(stream, message)
            for sentence in service.violations[num_violations:]:
                self._events.violated(self.name, sentence, is_excused=call.num_excused_plans > 0)
            call.num_excused_plans -= 1


def address_of(name: str) -> str:
    """Return the address that schedulers dial."""
    return f"{name}:1"

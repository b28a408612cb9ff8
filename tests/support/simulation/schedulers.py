"""Schedulers as nodes of the network: core, links and edge as in production, put together as the process does it."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NoReturn

import numpy as np

from edge_rig.tokenizers import try_here
from paceline.plan.values import Approach, BatchPlan, RecordId
from paceline.plan.versions import ProtocolRange
from paceline.process.callers import ANYBODY
from paceline.v1 import inference_pb2 as pb
from paceline_scheduler.api import status
from paceline_scheduler.api.edge import Edge
from paceline_scheduler.api.limits import EdgeLimits
from paceline_scheduler.api.servicer_session import serve_session
from paceline_scheduler.api.text.texts import Texts
from paceline_scheduler.core.core import Core
from paceline_scheduler.core.events import BeginAnew, BeginDrain, Effects, Event, ExecutorAttached, ReplyT, StepFinished
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.live import LiveRequest
from paceline_scheduler.core.planning.capacity import MAX_PREEMPTIONS
from paceline_scheduler.core.tables.rows import RUNNING
from paceline_scheduler.errors import SchedulerError
from paceline_scheduler.link.claim import OwnClaim
from paceline_scheduler.link.discovery import Discovery, parse_executors
from paceline_scheduler.link.executors import LinkedExecutors
from paceline_scheduler.link.fleet import Fleet
from paceline_scheduler.link.leadership import Leadership, ServingStatus
from paceline_scheduler.link.listener import Listener
from paceline_scheduler.link.tokenizers import TokenizerStore
from paceline_scheduler.observers.steps import StepObserver
from paceline_scheduler.runtime import Runtime
from simulation.forms import FormsHere
from simulation.loop import Node, NodeState, keep_failure
from simulation.network import Call, CallEndedError, Host, Site
from simulation.transport import SimulatedTransport

CONNECT = "Connect"
SESSION = "Session"
_GIVE_UP_S = 0.1  # for clients to hear of it
_LIMITS = EdgeLimits()


class _CheckedCore(Core):
    """A core that looks after every event whether its tables agree, and whether attempts only rise; that no plan
    gives a tenant more than its share of the blocks, but to a request that runs alone; and that nobody who could have a
    token goes without one where others have drafts.
    """

    def __init__(self, limits: CoreLimits) -> None:
        super().__init__(limits)
        self._attempts: dict[RecordId, tuple[LiveRequest, int]] = {}

    def apply(self, event: Event[ReplyT], now: float) -> Effects[ReplyT]:
        """Let something happen, and check after what executors say."""
        effects = super().apply(event, now)
        if isinstance(event, BeginAnew):
            self._attempts = {}
        elif isinstance(event, ExecutorAttached | StepFinished):
            self.views.check()
            self._check_attempts()
        return effects

    def plan(self, address: str, now: float) -> BatchPlan | None:
        """Return the next step, after looking at whose turn it was."""
        ready = self._ready(address)
        plan = self._plan_within_shares(address, now)
        if plan is not None and plan.num_draft_tokens.any():
            left = ready.difference(plan.rows.tolist(), (release.row for release in plan.releases))
            assert not left, f"rows {sorted(left)} of {address} go without a token where others have drafts"
        return plan

    def _ready(self, address: str) -> set[int]:
        """Return the rows of an executor that could compute a token now."""
        if self.views.description(address) is None:
            return set()
        rows = self.views.executor(address).ledger.rows
        return set(np.flatnonzero((rows.state == RUNNING) & (rows.num_scheduled < rows.limit)).tolist())

    def _plan_within_shares(self, address: str, now: float) -> BatchPlan | None:
        bounds = self.views.limits().tenants
        if not bounds.has_kv_shares:
            return super().plan(address, now)
        before = self._held(address)
        plan = super().plan(address, now)
        for tenant, (num_blocks, num_rows) in self._held(address).items():
            most = bounds.max_num_blocks(tenant, self.views.executor(address).description.num_blocks)
            is_more = most is not None and num_blocks > max(most, before.get(tenant, (0, 0))[0])
            assert not is_more or num_rows == 1, f"{tenant} holds {num_blocks} blocks of {address}, its share is {most}"
        return plan

    def _held(self, address: str) -> dict[str, tuple[int, int]]:
        """Return what tenants hold of an executor: blocks and rows."""
        if self.views.description(address) is None:
            return {}
        rows = self.views.executor(address).ledger.rows
        tables: dict[str, list[list[int]]] = {}
        for row, live in enumerate(rows.live):
            if live is not None and rows.state[row] == RUNNING:
                tables.setdefault(live.request.key.tenant, []).append(rows.tables[row])
        return {tenant: (len(set().union(*held)), len(held)) for tenant, held in tables.items()}

    def _check_attempts(self) -> None:
        before = self._attempts
        self._attempts = {live.request.key: (live, live.attempt) for live in self._state.requests.all()}
        for key, (live, attempt) in self._attempts.items():
            known, highest = before.get(key, (live, 0))
            assert known is not live or attempt >= highest, f"{key} fell from attempt {highest} to {attempt}"
            assert live.preemptions.count <= MAX_PREEMPTIONS, f"{key} was preempted {live.preemptions.count} times"


@dataclass(frozen=True, slots=True)
class _Process:
    """One scheduler process: its parts, and the task in which it links to executors."""

    runtime: Runtime
    executors: LinkedExecutors
    listener: Listener
    edge: Edge
    fleet: Fleet
    links: asyncio.Task[NoReturn]


class SchedulerHost(Host):
    """A host on which one scheduler process after another runs."""

    def __init__(self, site: Site, executors: str, limits: CoreLimits, ready_when: frozenset[ServingStatus]) -> None:
        super().__init__(site)
        self._process: _Process | None = None
        self._executors = executors
        self.new_core: Callable[[], Core] = lambda: _CheckedCore(limits)
        self._ready_when = ready_when

    def start(self, approach: Approach, protocols: ProtocolRange) -> None:
        node = self._next_node()
        claim = OwnClaim(f"{self.name}-{self._random.getrandbits(32):08x}", approach, protocols)
        claim.address = self.name
        self._process = self._loop.run_as(node, lambda: self._assemble(node, claim))

    @property
    def is_ready(self) -> bool:
        """Whether its health says that it serves; it says nothing while it is frozen or dead."""
        return self._status in self._ready_when

    @property
    def drives(self) -> bool:
        """Whether it runs, and runs requests."""
        return self._status is ServingStatus.SERVING

    @property
    def _status(self) -> ServingStatus:
        if self._process is None or self.node.state is not NodeState.RUNNING:
            return ServingStatus.NOT_SERVING
        return self._process.executors.readiness.status

    async def drain(self, seconds: float) -> None:
        """Let what runs end, for so long, as the process does when it is told to stop. To be run on its node."""
        process = self._process
        assert process is not None, "it runs"
        self.is_draining = True
        process.runtime.feed(BeginDrain())
        process.edge.drain("the scheduler is shutting down", seconds)
        until_handoff = process.fleet.until_handoff(process.runtime.views)
        parts = [asyncio.ensure_future(part) for part in (process.edge.drained(), until_handoff)]
        finished, handing_off = parts
        await asyncio.wait(parts, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        handing_off.cancel()
        if not finished.done():
            finished.cancel()
            process.links.cancel()
            process.listener.give_up("the scheduler is shutting down; send the request again")
            await asyncio.sleep(_GIVE_UP_S)

    def left(self) -> list[str]:
        if self._process is None or self.node.is_dead:
            return []
        num_unfinished = self._process.runtime.views.num_unfinished()
        left = [f"{num_unfinished} requests in {self.name}"] if num_unfinished else []
        left += [
            f"{executor.num_used_blocks} blocks of {executor.address} in {self.name}"
            for executor in self._process.executors.statuses()
            if executor.num_used_blocks
        ]
        return left

    def _assemble(self, node: Node, claim: OwnClaim) -> _Process:
        loop = self._loop
        runtime = Runtime(self.new_core(), loop.time, loop)
        leadership = Leadership(claim)
        executors = LinkedExecutors(runtime, StepObserver(runtime.views), leadership)
        listener = Listener(runtime, executors)
        texts = Texts(_LIMITS, lambda: datetime.fromtimestamp(loop.time(), UTC), trial=try_here)
        texts.forms = FormsHere(_LIMITS, self._random)
        edge = Edge(runtime, executors, texts, _LIMITS, self._random.random)
        runtime.deliver_to(edge.delivery)
        fleet = Fleet(
            Discovery(parse_executors(self._executors), _no_names),
            SimulatedTransport(self._network, node),
            leadership,
            listener,
            loop.time,
            self._random.random,
            TokenizerStore(texts.prepare),
        )
        self._network.listen(node, self._serve)
        links = loop.create_task(fleet.run())
        links.add_done_callback(keep_failure)
        return _Process(runtime, executors, listener, edge, fleet, links)

    async def _serve(self, call: Call) -> None:
        assert self._process is not None, "it listens while it runs"
        if call.method == CONNECT:
            call.tell(None)
            call.finish()
            return
        try:
            responses = serve_session(self._process.edge, _requests(call), ANYBODY)
            assert isinstance(responses, AsyncGenerator), (
                "which is closed when the call ends, as the server's guard does"
            )
            async with aclosing(responses):
                async for response in responses:
                    call.tell(response)
            call.finish()
        except SchedulerError as error:
            call.finish(status.describe(error, self._random.random))


async def _requests(call: Call) -> AsyncIterator[pb.SessionRequest]:
    """Yield what the client sends until it ends its side."""
    while True:
        try:
            message = await call.question()
        except CallEndedError:
            return
        assert isinstance(message, pb.SessionRequest), "what clients send"
        yield message


async def _no_names(name: str, port: int) -> tuple[str, ...]:
    raise OSError(f"no name {name}:{port}")

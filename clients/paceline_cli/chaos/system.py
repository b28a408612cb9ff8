"""The system that faults are done to: schedulers and executors on this machine, kept running, and their links.

Knows processes, addresses and links. Refuses to know which fault is done when.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import random
import sys
from collections.abc import AsyncIterator, Collection, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from enum import Enum
from types import TracebackType
from typing import Any, Self, TypeVar

from paceline_cli.chaos.metrics import Samples, read
from paceline_cli.chaos.proxy import FaultProxy
from paceline_cli.chaos.ranks import RankWatch, followers_of
from paceline_cli.chaos.waiting import until
from paceline_cli.supervisor.child import Child, start_child
from paceline_cli.supervisor.events import BecameReady, ChildEvent, ChildListener, Exited, Program, Started
from paceline_cli.supervisor.programs import LOOPBACK, Deployment, free_ports, programs_of
from paceline_cli.supervisor.supervisor import ChildFailedError, Restarts, Supervisor
from paceline_client.async_client import AsyncClient
from paceline_client.config import Timeout
from paceline_client.errors import PacelineError, RequestTimeoutError, UnavailableError
from paceline_client.results import Model

# What a service may take beyond its own limit before it is killed.
_GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.05
# Both are on this machine; one that is frozen does not answer at all.
_ASKING = Timeout(connect_seconds=0.5, call_seconds=0.5)
_EXECUTORS_OPTION = "--executors"
RANKS_OPTION = "--tensor-parallel-size"
# With one executor less the same load may be too much, and a scheduler would refuse some of it. Not here: what is asked
# is what becomes of requests that were taken.
_PATIENT_OPTIONS = ("--ttft-budget", "3600")

Answer = TypeVar("Answer")


class Need(Enum):
    """What a fault needs beside the processes."""

    LINKS = "links"
    """A `FaultProxy` per link: from the client to each scheduler, from each scheduler to each executor."""
    RIVAL = "rival"
    """A further address at which clients look for a scheduler."""


class LocalSystem:
    """A deployment that runs inside an `async with` block, on the main thread."""

    def __init__(
        self, deployment: Deployment, needs: Collection[Need], listener: ChildListener, chance: random.Random
    ) -> None:
        self.deployment = deployment
        self.degrees = degrees_of(deployment)
        self._roll = _Roll(listener)
        self._chance = chance
        self._needs = needs
        # A rival is a deployment of its own with the same executors.
        self._rival = _rival_of(deployment) if Need.RIVAL in needs else None
        self._stack = AsyncExitStack()
        self._supervisor: Supervisor | None = None
        self.client_links: dict[str, FaultProxy] = {}
        """By scheduler; empty where links are direct."""
        self.executor_links: dict[tuple[str, str], FaultProxy] = {}
        """By scheduler and executor; empty where links are direct."""

    @property
    def target(self) -> str:
        links = [link.address for link in self.client_links.values()]
        rivals = self._rival.targets if self._rival is not None else ()
        return ",".join((*(links or self.deployment.targets), *rivals))

    async def ready(self) -> list[Model]:
        """What is served, once everything runs. `ChildFailedError` when something never will."""
        await self._running.ready()
        return await self.during(self._served())

    async def during(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Do some work while the system runs. `ChildFailedError` interrupts it when a part ended for good."""
        return await self._running.during(work)

    async def whole(self) -> None:
        """Return when every process is ready and one scheduler has every executor."""
        names = (*self.deployment.scheduler_names, *self.deployment.executor_names)
        await until(lambda: self._roll.is_complete and all(map(self._running.process_id, names)))
        await self._served()

    async def metrics(self) -> dict[int, Samples]:
        """What the schedulers that answer show, by port."""
        return await read(ports.metrics for ports in self.deployment.schedulers)

    async def process_id(self, name: str) -> int:
        """Once a process runs it."""
        await until(lambda: self._running.process_id(name) is not None)
        process_id = self._running.process_id(name)
        assert process_id is not None
        return process_id

    async def ended(self, name: str, process_id: int) -> None:
        """Once that process does not run it any more."""
        await until(lambda: self._running.process_id(name) != process_id)

    def followers(self, name: str) -> list[int]:
        """The processes of an executor's other ranks; none while it is not there."""
        process_id = self._running.process_id(name)
        return [] if process_id is None else followers_of(process_id)

    def watch_ranks(self) -> list[RankWatch]:
        """Of the executors of several ranks that run now."""
        watches = []
        for name in (name for name, degree in self.degrees.items() if degree > 1):
            process_id = self._running.process_id(name)
            with contextlib.suppress(ProcessLookupError):
                watches += [] if process_id is None else [RankWatch(process_id)]
        return watches

    async def active_scheduler(self) -> str:
        """Once one serves."""
        names, targets = self.deployment.scheduler_names, self.deployment.targets
        if len(names) == 1:
            return names[0]
        while True:
            for name, target in zip(names, targets, strict=True):
                if await serves(target):
                    return name
            await asyncio.sleep(_POLL_SECONDS)

    @asynccontextmanager
    async def client_process(self) -> AsyncIterator[Child]:
        """A client process of its own in the middle of its streams, killed at the end of the block."""
        model, *_ = await self._served()
        command = (sys.executable, "-m", "paceline_cli.chaos.victim", self.target, model.name)
        async with self._one_more(Program("client", command)) as child:
            yield child

    @asynccontextmanager
    async def rival_process(self) -> AsyncIterator[Child]:
        """Another scheduler, which has taken an executor away; killed at the end of the block."""
        assert self._rival is not None, "this system has no place for a rival"
        command = (*programs_of(self._rival)[0].command, "--takeover")
        async with self._one_more(Program("rival", command)) as child:
            yield child

    @asynccontextmanager
    async def _one_more(self, program: Program) -> AsyncIterator[Child]:
        """A process that is ready, and is no part of what is kept running."""
        readiness = _Readiness()
        child = await start_child(program, readiness)
        ended = asyncio.create_task(child.wait())
        try:
            ready = asyncio.create_task(readiness.came.wait())
            await asyncio.wait([ready, ended], return_when=asyncio.FIRST_COMPLETED)
            ready.cancel()
            if ended.done():
                raise ChildFailedError(program.name, ended.result(), child.last_error(ended.result()))
            yield child
        finally:
            child.kill()
            await ended

    def kill(self) -> None:
        """End every process at once; the end of the block then comes soon."""
        self._running.kill()

    @property
    def _running(self) -> Supervisor:
        assert self._supervisor is not None, "the system runs inside its block"
        return self._supervisor

    async def _served(self) -> list[Model]:
        async with AsyncClient(self.deployment.target, timeout=Timeout(connect_seconds=5)) as client:
            while True:
                # The second: whoever serves is frozen, or starved.
                with contextlib.suppress(UnavailableError, RequestTimeoutError):
                    return await client.wait_until_ready(5, num_executors=self.deployment.num_executors)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            if Need.LINKS in self._needs:
                await self._open_links(stack)
            self._supervisor = await stack.enter_async_context(
                Supervisor(
                    [self._prepared(program) for program in programs_of(self.deployment)],
                    self._roll,
                    restarts=Restarts.ALWAYS,
                    grace_seconds=self.deployment.shutdown_timeout_seconds + _GRACE_SECONDS,
                )
            )
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _open_links(self, stack: AsyncExitStack) -> None:
        async def open_link(port: int) -> FaultProxy:
            return await stack.enter_async_context(FaultProxy(LOOPBACK, port, self._chance))

        ports = self.deployment.ports
        for scheduler, place in zip(self.deployment.scheduler_names, self.deployment.schedulers, strict=True):
            self.client_links[scheduler] = await open_link(place.api)
            for executor, executor_ports in zip(self.deployment.executor_names, ports.executors, strict=True):
                self.executor_links[scheduler, executor] = await open_link(executor_ports.api)

    def _prepared(self, program: Program) -> Program:
        """The program, as this system needs it: a scheduler refuses nobody and reaches executors through its links.

        An executor has ranks of its own number, which are left to end by themselves.
        """
        if program.name in self.degrees:
            alone = dataclasses.replace(program, leaves_children=True)
            degree = str(self.degrees[program.name])
            return with_option(alone, RANKS_OPTION, degree) if RANKS_OPTION in program.command else alone
        addresses = [link.address for (name, _), link in self.executor_links.items() if name == program.name]
        patient = dataclasses.replace(program, command=(*program.command, *_PATIENT_OPTIONS))
        return with_option(patient, _EXECUTORS_OPTION, ",".join(addresses)) if addresses else patient


async def serves(target: str) -> bool:
    """Whether the scheduler there serves, rather than stands by, hangs or is gone."""
    async with AsyncClient(target, timeout=_ASKING) as client:
        try:
            return bool(await client.list_models())
        except PacelineError:
            return False


def degrees_of(deployment: Deployment) -> dict[str, int]:
    """How many ranks each executor has: what its options say, of several numbers the next one. ValueError for none."""
    options = deployment.executor_options
    told = options[options.index(RANKS_OPTION) + 1] if RANKS_OPTION in options else "1"
    return dict(zip(deployment.executor_names, itertools.cycle(map(int, told.split(","))), strict=False))


def with_option(program: Program, option: str, value: str) -> Program:
    place = program.command.index(option) + 1
    return dataclasses.replace(program, command=(*program.command[:place], value, *program.command[place + 1 :]))


def _rival_of(deployment: Deployment) -> Deployment:
    ports = dataclasses.replace(free_ports(0), executors=deployment.ports.executors)
    return dataclasses.replace(deployment, ports=ports, with_standby=False)


class _Readiness:
    def __init__(self) -> None:
        self.came = asyncio.Event()

    def on_event(self, event: ChildEvent) -> None:
        if isinstance(event, BecameReady):
            self.came.set()


class _Roll:
    """Which programs are ready now; passes every event on."""

    def __init__(self, listener: ChildListener) -> None:
        self._listener = listener
        self._is_ready: dict[str, bool] = {}

    @property
    def is_complete(self) -> bool:
        return all(self._is_ready.values())

    def on_event(self, event: ChildEvent) -> None:
        match event:
            case Started(name):
                self._is_ready[name] = False
            case Exited(name):
                self._is_ready[name] = False
            case BecameReady(name):
                self._is_ready[name] = True
        self._listener.on_event(event)

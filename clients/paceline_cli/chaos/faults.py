"""The faults, each done once when asked: to a random victim, for a random time, all drawn from one seed.

Knows how each is done. Refuses to know when, and what comes of it.
"""

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from paceline_cli.chaos.proxy import WHOLE, Direction, FaultProxy, LinkState
from paceline_cli.chaos.system import LocalSystem, Need
from paceline_cli.chaos.victim import NUM_STREAMS
from paceline_cli.chaos.waiting import until

_SLOW = LinkState(delay_seconds=0.1, jitter_seconds=0.2)
# A plan or a delta is some hundred bytes, a snapshot some ten thousand.
_NARROW = LinkState(bytes_per_second=32_000)
_SILENCES = (frozenset({Direction.TO_SERVER}), frozenset({Direction.TO_CLIENT}), frozenset(Direction))

Begin = Callable[[str], None]
"""Called at the moment at which a fault is done, with what exactly was done to whom."""


class FaultKind(StrEnum):
    SCHEDULER_KILL = "scheduler-kill"
    SCHEDULERS_KILL = "schedulers-kill"
    """Every scheduler at once, the standby too."""
    SCHEDULER_FREEZE = "scheduler-freeze"
    EXECUTOR_KILL = "executor-kill"
    EXECUTORS_KILL = "executors-kill"
    """Every executor at once: nothing is left that could go on."""
    EXECUTOR_FREEZE = "executor-freeze"
    RANK_KILL = "rank-kill"
    """A rank but the first, of an executor that has several."""
    RANK_FREEZE = "rank-freeze"
    BOTH_KILL = "both-kill"
    """The scheduler and an executor at once."""
    CLIENT_KILL = "client-kill"
    """A client process of its own, in the middle of its streams."""
    RIVAL = "rival"
    """Another scheduler takes the executors away, drives them for a while and is killed."""
    CLIENT_CUT = "client-cut"
    """Connections between clients and scheduler are reset."""
    CLIENT_SILENCE = "client-silence"
    """They stay open and nothing passes, in one direction or both."""
    CLIENT_DELAY = "client-delay"
    CLIENT_THROTTLE = "client-throttle"
    EXECUTOR_CUT = "executor-cut"
    """The same four between the scheduler and one executor."""
    EXECUTOR_SILENCE = "executor-silence"
    EXECUTOR_DELAY = "executor-delay"
    EXECUTOR_THROTTLE = "executor-throttle"

    @property
    def is_of_ranks(self) -> bool:
        return self in {FaultKind.RANK_KILL, FaultKind.RANK_FREEZE}

    @property
    def need(self) -> Need | None:
        """Beside the processes."""
        if self is FaultKind.RIVAL:
            return Need.RIVAL
        return Need.LINKS if self.value.endswith(("-cut", "-silence", "-delay", "-throttle")) else None


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault to be done. To whom is drawn when it is."""

    kind: FaultKind
    seconds: float = 0.0
    """How long it lasts; of no meaning for a kill and a cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultTimes:
    """How long what lasts may last, in seconds; one of them is drawn each time."""

    freezes: tuple[float, ...] = (0.1, 1.0, 5.0)
    links: tuple[float, ...] = (0.2, 1.0, 3.0)
    rivals: tuple[float, ...] = (1.0, 2.0)

    def draw(self, kind: FaultKind, chance: random.Random) -> Fault:
        if kind.endswith("-freeze"):
            return Fault(kind, chance.choice(self.freezes))
        return Fault(kind, chance.choice(self.rivals if kind is FaultKind.RIVAL else self.links))


class Injector:
    def __init__(self, system: LocalSystem, chance: random.Random) -> None:
        self._system = system
        self._chance = chance

    async def inject(self, fault: Fault, begin: Begin) -> None:
        """Do it: `begin` is called at the moment it begins, and this returns when it is over, not its consequences."""
        system, kinds = self._system, FaultKind
        match fault.kind:
            case kinds.SCHEDULER_KILL:
                await self._kill([await system.active_scheduler()], begin)
            case kinds.SCHEDULERS_KILL:
                await self._kill(system.deployment.scheduler_names, begin)
            case kinds.SCHEDULER_FREEZE:
                await self._freeze_program(await system.active_scheduler(), fault.seconds, begin)
            case kinds.EXECUTOR_KILL:
                await self._kill([self._executor()], begin)
            case kinds.EXECUTORS_KILL:
                await self._kill(system.deployment.executor_names, begin)
            case kinds.EXECUTOR_FREEZE:
                await self._freeze_program(self._executor(), fault.seconds, begin)
            case kinds.RANK_KILL:
                await self._kill_rank(begin)
            case kinds.RANK_FREEZE:
                name, rank, process_id = await self._rank()
                await _freeze(f"{name}'s rank {rank}", process_id, fault.seconds, begin)
            case kinds.BOTH_KILL:
                await self._kill([await system.active_scheduler(), self._executor()], begin)
            case kinds.CLIENT_KILL:
                await self._kill_client(begin)
            case kinds.RIVAL:
                await self._let_rival_take_over(fault.seconds, begin)
            case kinds.CLIENT_CUT | kinds.CLIENT_SILENCE | kinds.CLIENT_DELAY | kinds.CLIENT_THROTTLE:
                name = await system.active_scheduler()
                await self._harm_link(system.client_links[name], f"clients - {name}", fault, begin)
            case _:
                name, executor = await system.active_scheduler(), self._executor()
                await self._harm_link(system.executor_links[name, executor], f"{name} - {executor}", fault, begin)

    def _executor(self) -> str:
        return self._chance.choice(self._system.deployment.executor_names)

    async def _kill(self, names: Sequence[str], begin: Begin) -> None:
        process_ids = [await self._system.process_id(name) for name in names]
        begin(" and ".join(names))
        for process_id in process_ids:
            os.kill(process_id, signal.SIGKILL)
        for name, process_id in zip(names, process_ids, strict=True):
            await self._system.ended(name, process_id)

    async def _freeze_program(self, name: str, seconds: float, begin: Begin) -> None:
        await _freeze(name, await self._system.process_id(name), seconds, begin)

    async def _kill_rank(self, begin: Begin) -> None:
        name, rank, process_id = await self._rank()
        executor = await self._system.process_id(name)
        begin(f"{name}'s rank {rank}")
        os.kill(process_id, signal.SIGKILL)
        await self._system.ended(name, executor)

    async def _rank(self) -> tuple[str, int, int]:
        """Any but the first, of an executor that has several."""
        name = self._chance.choice([name for name, degree in self._system.degrees.items() if degree > 1])
        await until(lambda: bool(self._system.followers(name)))
        followers = self._system.followers(name)
        rank = self._chance.randrange(len(followers))
        return name, rank + 1, followers[rank]

    async def _kill_client(self, begin: Begin) -> None:
        async with self._system.client_process() as client:
            begin(f"with {NUM_STREAMS} streams")
            client.kill()

    async def _let_rival_take_over(self, seconds: float, begin: Begin) -> None:
        begin(f"for {seconds:g} s")
        async with self._system.rival_process():
            await asyncio.sleep(seconds)

    async def _harm_link(self, link: FaultProxy, name: str, fault: Fault, begin: Begin) -> None:
        match fault.kind:
            case FaultKind.CLIENT_CUT | FaultKind.EXECUTOR_CUT:
                begin(name)
                link.cut()
            case FaultKind.CLIENT_SILENCE | FaultKind.EXECUTOR_SILENCE:
                silent = self._chance.choice(_SILENCES)
                way = "both ways" if len(silent) > 1 else next(iter(silent)).value
                await _treat(link, f"{name}, {way}", LinkState(silent=silent), fault.seconds, begin)
            case FaultKind.CLIENT_DELAY | FaultKind.EXECUTOR_DELAY:
                await _treat(link, name, _SLOW, fault.seconds, begin)
            case _:
                await _treat(link, name, _NARROW, fault.seconds, begin)


async def _freeze(name: str, process_id: int, seconds: float, begin: Begin) -> None:
    begin(f"{name} for {seconds:g} s")
    os.kill(process_id, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGCONT)


async def _treat(link: FaultProxy, name: str, state: LinkState, seconds: float, begin: Begin) -> None:
    begin(f"{name}, for {seconds:g} s")
    link.become(state)
    try:
        await asyncio.sleep(seconds)
    finally:
        link.become(WHOLE)

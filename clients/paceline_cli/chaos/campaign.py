"""One fault after another on a system under load: waits at random, injects, and lets the system come back.

Knows when. Refuses to know how a fault is done and how its consequences are counted.
"""

import asyncio
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from paceline_cli.chaos.claims import untrue_of_fault
from paceline_cli.chaos.faults import Fault, FaultKind, FaultTimes, Injector
from paceline_cli.chaos.ledger import UNDISTURBED, ChaosLedger, FaultWindow
from paceline_cli.chaos.metrics import Samples, between
from paceline_cli.chaos.system import LocalSystem
from paceline_cli.chaos.waiting import until

# A pause is drawn from this fraction below to this fraction above its nominal length.
_SPREAD = 0.5


class CampaignListener(Protocol):
    """Hears what the campaign does. Must not block."""

    def on_fault(self, window: FaultWindow) -> None:
        """A fault was done."""

    def on_settled(self, window: FaultWindow) -> None:
        """Everybody has got something since, and all parts are there again; or the wait for that was given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultTiming:
    """How much time is left between faults."""

    pause_seconds: float = 2.0
    """From when the system has settled to the next fault; each is drawn from a half to one and a half of it."""
    settle_seconds: float = 120.0
    """How long to wait for the system to settle before going on anyway, which counts as a failure."""


class SettledWhen(Enum):
    STREAMS = "streams"
    """Each stream that was delivering has got something since, or has ended."""
    SYSTEM = "system"
    """That, and every process is there again, with every executor in the hands of one scheduler."""


class Campaign:
    def __init__(
        self,
        system: LocalSystem,
        injector: Injector,
        ledger: ChaosLedger,
        timing: FaultTiming,
        listener: CampaignListener,
        chance: random.Random,
        times: FaultTimes,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._system = system
        self._injector = injector
        self._ledger = ledger
        self._timing = timing
        self._listener = listener
        self._chance = chance
        self._times = times
        self._now = now
        self._metrics: dict[int, Samples] = {}  # by port, as they were last: one that is frozen does not answer

    async def run(self, kinds: Iterable[FaultKind]) -> None:
        """Return when all of them were done and the system has settled after the last."""
        await self._watch_undisturbed()
        for kind in kinds:
            await self._pause()
            await self.inject(self._times.draw(kind, self._chance), SettledWhen.SYSTEM)
        await self._pause()
        self._ledger.close(self._now())

    async def inject(self, fault: Fault, calm: SettledWhen) -> FaultWindow:
        """Do one fault now, and wait for calm as long as `FaultTiming.settle_seconds`."""

        def begin(detail: str) -> None:
            self._listener.on_fault(self._ledger.open_window(fault.kind, detail, self._now()))

        self._metrics |= await self._system.metrics()
        watches = self._system.watch_ranks()
        try:
            async with asyncio.timeout(self._timing.settle_seconds):
                await self._injector.inject(fault, begin)
                await until(lambda: not self._ledger.num_waiting)
                if calm is SettledWhen.SYSTEM:
                    await self._system.whole()
            is_given_up = False
        except TimeoutError:
            is_given_up = True
        window = self._ledger.current
        window.is_given_up = is_given_up
        window.settled_seconds = None if is_given_up else self._now() - window.began_s
        window.ranks.num_left = sum([await watch.close() for watch in watches])
        window.ranks.seconds = [watch.ended_s - window.began_s for watch in watches if watch.ended_s is not None]
        claimed = between(self._metrics, await self._system.metrics())
        wait_s = self._ledger.longest_wait_s(self._now())
        window.untrue += untrue_of_fault(claimed, window, wait_s, self._system.deployment.num_executors)
        self._listener.on_settled(window)
        return window

    async def _watch_undisturbed(self) -> None:
        """What pauses look like when nothing happens, for comparison: once all streams have begun."""
        await until(lambda: self._ledger.is_in_full_flow)
        self._ledger.open_window(UNDISTURBED, "", self._now())
        await asyncio.sleep(self._timing.pause_seconds)

    async def _pause(self) -> None:
        nominal = self._timing.pause_seconds
        await asyncio.sleep(nominal * (1 - _SPREAD + 2 * _SPREAD * self._chance.random()))

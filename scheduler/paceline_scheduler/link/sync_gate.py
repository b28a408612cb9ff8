"""Whether it is known what every executor runs: until then nobody can tell a new request from one that goes on.

Knows addresses, and who drives what this scheduler does not. Refuses to know requests and plans.
"""

import asyncio
import contextlib
from collections.abc import Callable

from paceline_scheduler.backend import Arrival
from paceline_scheduler.errors import NoExecutorError, StandbyError
from paceline_scheduler.holder import Holder

MAX_LEASE_S = 1.5  # a little more than executors give a holder that is silent
MAX_WAIT_S = 3.0  # twice what it takes to give up an executor that says nothing
_RETRY_S = 0.5
_STANDBY_RETRY_S = 0.15  # when who is named does not serve either, it has died and its lease is almost over


class SyncGate:
    """Closed from the start, and from a displacement, until every executor was attached or is lost.

    `on_split` is called when another scheduler turns out to keep some of the executors, while this one has others.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_split: Callable[[], None]) -> None:
        self._loop = loop
        self._on_split = on_split
        self._is_looking = True
        self._is_driving = False  # an executor, since the gate was closed
        self._split_timer: asyncio.TimerHandle | None = None
        self._is_split_possible = False  # whoever had died would have lost the others by now
        self._awaited: dict[str, None] = {}
        self._held: dict[str, Holder] = {}  # by another scheduler that is alive
        self._changed = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """Whether it is known what all executors run."""
        return not self._is_looking and not self._awaited

    @property
    def holder(self) -> Holder | None:
        """Who drives executors while this one has none, or cannot begin without those; None if nobody is known."""
        if self.is_open or (self._is_driving and not self._is_split_possible):
            return None
        holders = [self._held[address] for address in self._awaited if address in self._held]
        return max(holders, key=lambda holder: (holder.term, holder.scheduler_id), default=None)

    def expect(self, addresses: tuple[str, ...]) -> None:
        """These are the executors there are: wait for word of each."""
        self._is_looking = self._is_driving = self._is_split_possible = False
        if self._split_timer is not None:
            self._split_timer.cancel()
            self._split_timer = None
        self._awaited = dict.fromkeys(addresses)
        self._held = {address: holder for address, holder in self._held.items() if address in self._awaited}
        self._tell()

    def is_ours(self, address: str) -> None:
        """The executor was attached."""
        if not self._is_driving:
            self._is_driving = True
            self._split_timer = self._loop.call_later(MAX_LEASE_S, self._expect_split)
        self.has_word(address)

    def has_word(self, address: str) -> None:
        """The executor was attached, or is lost, or is not looked for any more."""
        self._awaited.pop(address, None)
        self._held.pop(address, None)
        self._tell()

    def is_held(self, address: str, holder: Holder | None) -> None:
        """Another scheduler drives the executor: word of it may not come for a long time. None: nobody is known to."""
        self._held.pop(address, None)
        if holder is not None:
            self._held[address] = holder
            if not self._is_driving:
                # It may have been given up while it was loading, before anybody could drive it.
                self._awaited[address] = None
        self._tell()

    def require_lead(self) -> None:
        """Raise StandbyError while another scheduler is known to drive the executors."""
        if self.holder is not None:
            raise StandbyError(self.holder, _STANDBY_RETRY_S)

    async def passed(self, arrival: Arrival) -> None:
        """Return when the gate is open; raises NoExecutorError when that will not be soon.

        When another scheduler drives the executors that is a StandbyError: at once for a request that is new. One that
        was begun waits for as long as a holder is named that has just died, since its client may be here because of it.
        """
        if arrival is Arrival.NEW:
            await self._until(lambda: self.is_open or self.holder is not None, MAX_WAIT_S)
        else:
            await self._until(lambda: self.is_open, MAX_LEASE_S)
            await self._until(lambda: self.is_open or self.holder is not None, MAX_WAIT_S - MAX_LEASE_S)
        self.require_lead()
        if not self.is_open:
            raise NoExecutorError("not all executors have answered yet; try again", _RETRY_S)

    async def _until(self, holds: Callable[[], bool], seconds: float) -> None:
        """Wait until something holds, for so long at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not holds():
                    self._changed.clear()
                    await self._changed.wait()

    def _expect_split(self) -> None:
        self._is_split_possible = True
        self._tell()
        self._on_split()

    def _tell(self) -> None:
        self._changed.set()

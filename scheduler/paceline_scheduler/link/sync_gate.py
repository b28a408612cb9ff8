"""Whether it is known what every executor runs: until then nobody can tell a new request from one that goes on.

Knows addresses. Refuses to know requests and plans.
"""

import asyncio
import contextlib

from paceline_scheduler.errors import NoExecutorError

MAX_LEASE_S = 1.5  # a little more than executors give a holder that is silent
MAX_WAIT_S = 3.0  # twice what it takes to give up an executor that says nothing
_RETRY_S = 0.5


class SyncGate:
    """Closed from the start, and from a displacement, until every executor was attached or is lost."""

    def __init__(self) -> None:
        self._is_looking = True
        self._awaited: dict[str, None] = {}
        self._held: dict[str, None] = {}  # by another scheduler that is alive
        self._changed = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """Whether it is known what all executors run."""
        return not self._is_looking and not self._awaited

    def expect(self, addresses: tuple[str, ...]) -> None:
        """These are the executors there are: wait for word of each."""
        self._is_looking = False
        self._awaited = dict.fromkeys(addresses)
        self._held = {address: None for address in addresses if address in self._held}
        self._tell()

    def has_word(self, address: str) -> None:
        """The executor was attached, or is lost, or is not looked for any more."""
        self._awaited.pop(address, None)
        self._held.pop(address, None)
        self._tell()

    def is_held(self, address: str) -> None:
        """Another scheduler drives the executor: word of it may not come for a long time."""
        self._held[address] = None
        self._tell()

    def is_not_held(self, address: str) -> None:
        """Nobody is known to drive the executor any more."""
        self._held.pop(address, None)

    async def passed(self) -> None:
        """Return when the gate is open; raises NoExecutorError when that will not be soon."""
        with contextlib.suppress(TimeoutError):
            # A holder that has just died is named until its lease is over.
            async with asyncio.timeout(MAX_LEASE_S):
                await self._until_open()
        if self.is_open:
            return
        if any(address in self._held for address in self._awaited):
            raise NoExecutorError("another scheduler drives the executors; send the request there", _RETRY_S)
        try:
            async with asyncio.timeout(MAX_WAIT_S - MAX_LEASE_S):
                await self._until_open()
        except TimeoutError:
            raise NoExecutorError("not all executors have answered yet; try again", _RETRY_S) from None

    async def _until_open(self) -> None:
        while not self.is_open:
            self._changed.clear()
            await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()

"""All links of this scheduler: one per executor that discovery names.

An executor that left the list or the DNS answer keeps its link while its stream lasts: leaving DNS is how a pod begins
to end, not how it ends.
"""

import asyncio
from collections.abc import Callable
from typing import NoReturn

import structlog

from paceline_scheduler.errors import DivergenceError, LinkError
from paceline_scheduler.holder import Holder
from paceline_scheduler.link.discovery import REFRESH_S, Discovery
from paceline_scheduler.link.executor_link import GET_INFO_TIMEOUT_S, ExecutorLink, LinkListener
from paceline_scheduler.link.identity import Identity
from paceline_scheduler.link.tokenizers import TokenizerShelf
from paceline_scheduler.link.transport import Transport

log = structlog.get_logger(__name__)


class Fleet:
    """Starts and stops links as executors come and go, and resolves this scheduler's term before the first of them."""

    def __init__(
        self,
        discovery: Discovery,
        transport: Transport,
        identity: Identity,
        listener: LinkListener,
        clock: Callable[[], float],
        jitter: Callable[[], float],
        tokenizers: TokenizerShelf | None = None,
    ) -> None:
        self._discovery = discovery
        self._transport = transport
        self._identity = identity
        self._listener = listener
        self._clock = clock
        self._jitter = jitter
        self._last_complaint = ""
        self._tokenizers = tokenizers or TokenizerShelf()
        self._links: dict[str, ExecutorLink] = {}
        self._tasks: dict[str, asyncio.Task[NoReturn]] = {}

    @property
    def scheduler_id(self) -> str:
        """This scheduler's id, random per boot."""
        return self._identity.scheduler_id

    def advertise(self, address: str) -> None:
        """Tell executors from now on where clients reach this scheduler: those who stand in line hear it from them."""
        self._identity.address = address

    async def has_heir(self) -> bool:
        """Whether another scheduler stands in line at every executor that this one drives."""
        answers = await asyncio.gather(*(link.has_heir() for link in self._links.values() if link.is_ours))
        return bool(answers) and all(answers)

    async def run(self) -> NoReturn:
        """Keep every executor attached that discovery names, until cancelled."""
        try:
            addresses = await self._discovery.look()
            await asyncio.gather(*(self._learn_term(address) for address in addresses))
            self._listener.looked(addresses)
            while True:
                self._update(addresses)
                self._complain(self._discovery.last_error)
                await self._rest()
                if self._discovery.changes:
                    addresses = await self._discovery.look()
        finally:
            await self._stop(list(self._tasks))

    async def _learn_term(self, address: str) -> None:
        connection = self._transport.connect(address)
        try:
            self._identity.learn(await connection.get_info(GET_INFO_TIMEOUT_S))
        except (LinkError, DivergenceError) as error:
            log.info("executor_unreachable", address=address, reason=str(error), attempts=0)
        finally:
            await connection.close()

    async def _rest(self) -> None:
        """Let time pass until the next look. A link never ends: what one fails with is raised."""
        if not self._tasks:
            await asyncio.sleep(REFRESH_S)
            return
        ended, _ = await asyncio.wait(self._tasks.values(), timeout=REFRESH_S, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()

    def _complain(self, reason: str) -> None:
        if reason and reason != self._last_complaint:
            log.warning("discovery_failed", reason=reason)
        self._last_complaint = reason

    def _update(self, addresses: tuple[str, ...]) -> None:
        for address in addresses:
            if address not in self._links:
                self._start(address)
        for address in [address for address in self._links if address not in addresses]:
            if not self._links[address].has_stream:
                self._remove(address)

    def _start(self, address: str) -> None:
        link = ExecutorLink(
            address,
            self._transport,
            self._identity,
            self._tokenizers,
            self._listener,
            self._displaced,
            self._raised,
            self._left_out,
            self._is_behind,
            self._clock,
            self._jitter,
        )
        self._links[address] = link
        self._listener.expected(address)
        task = asyncio.get_running_loop().create_task(link.run(), name=f"link {address}")
        self._tasks[address] = task

    def _remove(self, address: str) -> None:
        log.info("executor_removed", address=address)
        del self._links[address]
        self._tasks.pop(address).cancel()
        self._listener.removed(address)

    def _displaced(self, active: Holder, was_acting: bool) -> None:
        """A scheduler of a higher claim has an executor: it shall have all of them, also those just coming to us.

        Else two that start at once would each hold some, and each wait for the rest.
        """
        if was_acting:
            self._give_up(active)
        for link in self._links.values():
            link.stand_by(f"{active} took over")

    def _give_up(self, active: Holder) -> None:
        log.warning("displaced", reason=f"{active} took over", active_address=active.address, term=active.term)
        self._listener.displaced(active)

    def _left_out(self) -> None:
        """Give up what waits here if it would wait for ever: no executor is left, and another scheduler drives one.

        That one may have the lower claim, as an executor that has just started takes the first scheduler that comes.
        """
        links = self._links.values()
        active = next((link.holder for link in links if link.holder is not None), None)
        if self._identity.is_acting and active is not None and all(link.is_lost for link in links):
            self._identity.is_acting = False
            self._give_up(active)

    def _is_behind(self) -> bool:
        return any(link.holder is not None for link in self._links.values())

    def _raised(self) -> None:
        for link in self._links.values():
            link.attach_anew()

    async def _stop(self, addresses: list[str]) -> None:
        tasks = [self._tasks.pop(address) for address in addresses]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

"""All links of this scheduler: one per executor that discovery names.

An executor that left the list or the DNS answer keeps its link while its stream lasts: leaving DNS is how a pod begins
to end. The last one of its model is kept for longer, with what waits for it: the next pod has another address.
"""

import asyncio
from collections.abc import Callable
from typing import NoReturn

import structlog

from paceline.plan.values import ExecutorInfo
from paceline_scheduler.core.views import CoreViews
from paceline_scheduler.errors import DivergenceError, LinkError
from paceline_scheduler.link.discovery import REFRESH_S, Discovery
from paceline_scheduler.link.executor_link import GET_INFO_TIMEOUT_S, ExecutorLink
from paceline_scheduler.link.executor_record import LinkPhase
from paceline_scheduler.link.leadership import Leadership
from paceline_scheduler.link.link_listener import LinkListener
from paceline_scheduler.link.steward import Steward
from paceline_scheduler.link.tokenizers import TokenizerStore
from paceline_scheduler.link.transport import Transport

LOOK_S = 0.1

log = structlog.get_logger(__name__)


class Fleet:
    """It learns which terms were claimed before the first link starts."""

    def __init__(
        self,
        discovery: Discovery,
        transport: Transport,
        leadership: Leadership,
        listener: LinkListener,
        clock: Callable[[], float],
        jitter: Callable[[], float],
        tokenizers: TokenizerStore | None = None,
    ) -> None:
        self._discovery = discovery
        self._transport = transport
        self._leadership = leadership
        self._steward = Steward(leadership, listener, clock, jitter, self._end_stream)
        self._last_complaint = ""
        self._tokenizers = tokenizers or TokenizerStore()
        self._links: dict[str, ExecutorLink] = {}
        self._tasks: dict[str, asyncio.Task[NoReturn]] = {}
        self._left_s: dict[str, float] = {}  # since when an address that has a link is not named any more

    @property
    def scheduler_id(self) -> str:
        return self._leadership.claim.scheduler_id

    def advertise(self, address: str) -> None:
        """Queued schedulers hear from executors where clients reach this one."""
        self._leadership.claim.address = address

    async def has_successor(self) -> bool:
        driven = (link for address, link in self._links.items() if self._leadership[address].phase is LinkPhase.DRIVEN)
        answers = await asyncio.gather(*(link.has_successor() for link in driven))
        return bool(answers) and all(answers)

    async def until_handoff(self, views: CoreViews) -> None:
        """A successor is queued at every executor driven here, and can go on with all requests left.

        Those whose clients do not come back are waited for first, and the others run on here meanwhile.
        """
        while not (_are_resumable(views) and await self.has_successor() and _are_resumable(views)):  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)

    async def run(self) -> NoReturn:
        try:
            addresses = await self._discovery.look()
            infos = await asyncio.gather(*(self._info_of(address) for address in addresses))
            told = {address: info for address, info in zip(addresses, infos, strict=True) if info is not None}
            self._leadership.look(addresses, told, self._steward.clock())
            self._steward.listener.looked(addresses)
            while True:
                self._update(addresses)
                self._complain(self._discovery.last_error)
                await self._rest()
                if self._discovery.changes:
                    addresses = await self._discovery.look()
        finally:
            self._steward.stop()
            await self._stop(list(self._tasks))

    async def _info_of(self, address: str) -> ExecutorInfo | None:
        """Returns None if the executor does not say."""
        connection = self._transport.connect(address)
        try:
            return await connection.get_info(GET_INFO_TIMEOUT_S)
        except (LinkError, DivergenceError) as error:
            log.info("waiting_for_executor", address=address, reason=str(error), attempts=0)
            return None
        finally:
            await connection.close()

    async def _rest(self) -> None:
        """Raises what a link failed with: none ever ends."""
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
        now_s, listener = self._steward.clock(), self._steward.listener
        self._left_s = {each: self._left_s.get(each, now_s) for each in self._links if each not in addresses}
        for address, left_s in self._left_s.items():
            if self._leadership[address].hello is None and not listener.is_expected_back(address, now_s - left_s):
                self._remove(address)

    def _start(self, address: str) -> None:
        link = self._links[address] = ExecutorLink(address, self._transport, self._tokenizers, self._steward)
        self._steward.expect(address)
        self._tasks[address] = asyncio.get_running_loop().create_task(link.run(), name=f"link {address}")

    def _remove(self, address: str) -> None:
        del self._links[address]
        self._tasks.pop(address).cancel()
        self._steward.remove(address)

    def _end_stream(self, address: str, error: LinkError) -> None:
        self._links[address].end(error)

    async def _stop(self, addresses: list[str]) -> None:
        tasks = [self._tasks.pop(address) for address in addresses]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _are_resumable(views: CoreViews) -> bool:
    return all(live.request.is_resumable for live in views.with_listener())

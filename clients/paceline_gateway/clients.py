"""Clients of the scheduler, one for each bearer, because a session belongs to one tenant. The bearer is passed on."""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from paceline_client import AccessDeniedError, AsyncClient, OverloadedError

MAX_CLIENTS = 256
IDLE_S = 60.0
_TIDY_S = 10.0

Connect = Callable[[str | None], AsyncClient]


@dataclass(slots=True)
class _SharedClient:
    client: AsyncClient
    num_users: int = 0
    idle_since_s: float = 0.0
    is_refused: bool = False
    """Its bearer is unknown: not worth a place."""


class Clients:
    """At most `max_clients`; those that nobody has used for `idle_s` are closed."""

    def __init__(self, connect: Connect, max_clients: int = MAX_CLIENTS, idle_s: float = IDLE_S) -> None:
        self._connect = connect
        self._max_clients = max_clients
        self._idle_s = idle_s
        self._shared: OrderedDict[str | None, _SharedClient] = OrderedDict()  # the one that was used last is last

    def __len__(self) -> int:
        return len(self._shared)

    @contextlib.asynccontextmanager
    async def of(self, bearer: str | None) -> AsyncIterator[AsyncClient]:
        """`OverloadedError` where all are in use, `InvalidRequestError` for what is no token."""
        shared = self._shared.get(bearer)
        if shared is None:
            await self._make_room()
            shared = self._shared[bearer] = _SharedClient(self._connect(bearer))
        self._shared.move_to_end(bearer)
        shared.num_users += 1
        try:
            yield shared.client
        except AccessDeniedError:
            shared.is_refused = True
            raise
        finally:
            shared.num_users -= 1
            shared.idle_since_s = asyncio.get_running_loop().time()
            if shared.is_refused and not shared.num_users:
                await self._close(bearer, shared)

    @contextlib.asynccontextmanager
    async def alone(self, bearer: str | None) -> AsyncIterator[AsyncClient]:
        """One of one's own: of two requests of one id, a session could not tell the outputs apart."""
        async with self._connect(bearer) as client:
            yield client

    async def tidy(self) -> None:
        """For ever: close those that are idle."""
        while True:
            await asyncio.sleep(_TIDY_S)
            before_s = asyncio.get_running_loop().time() - self._idle_s
            idle = [(bearer, each) for bearer, each in self._shared.items() if not each.num_users]
            for bearer, each in idle:
                if each.idle_since_s < before_s:
                    await self._close(bearer, each)

    async def close(self) -> None:
        shared, self._shared = self._shared, OrderedDict()
        await asyncio.gather(*(each.client.close() for each in shared.values()))

    async def _make_room(self) -> None:
        while len(self._shared) >= self._max_clients:
            idle = next(((bearer, each) for bearer, each in self._shared.items() if not each.num_users), None)
            if idle is None:
                raise OverloadedError(f"{self._max_clients} keys are in use here; try again", retry_after=1.0)
            await self._close(*idle)

    async def _close(self, bearer: str | None, shared: _SharedClient) -> None:
        if self._shared.get(bearer) is shared and not shared.num_users:
            del self._shared[bearer]
            await shared.client.close()

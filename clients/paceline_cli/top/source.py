"""Asks the scheduler that drives the executors, again and again, and looks for it when it is gone.

Knows connections. Refuses to know what is shown: it tells a `TopState` what came.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import grpc.aio

from paceline_cli.top import wire
from paceline_cli.top.state import TopState
from paceline_cli.top.values import Overview
from paceline_client.addresses import ADMIN_PORT, Addresses
from paceline_client.channel import GrpcChannel
from paceline_client.config import Retry, Tls
from paceline_client.credentials import Credentials
from paceline_client.dialler import Dialler, SharedChannel
from paceline_client.errors import (
    AccessDeniedError,
    PacelineError,
    UnavailableError,
    UnsupportedError,
    WrongServerError,
)
from paceline_client.wire import CallChannel, errors_of_calls

AnswerT = TypeVar("AnswerT")

_CONNECT_SECONDS = 3.0
_CALL_SECONDS = 5.0  # longer is not a slow link but a scheduler that does not answer
_WATCH_AGAIN_SECONDS = 1.0
_WINDOW_BYTES = 8 * 1024  # of a stream: what is under way when a link is slow is old when it arrives


class Source:
    """One operator's connection. Used on one event loop; `close` it.

    `clock` is that of the state. InvalidRequestError for a target, token or certificate that cannot be one.
    """

    def __init__(
        self, target: str, tls: Tls | None, token: str | Path | None, state: TopState, clock: Callable[[], float]
    ) -> None:
        addresses = Addresses(target, default_port=ADMIN_PORT)
        credentials = Credentials(tls, token)
        self._addresses = addresses
        self._dialler = Dialler(
            addresses,
            dial=lambda address: GrpcChannel(
                address, credentials, server_name=addresses.name_of(address), window_bytes=_WINDOW_BYTES
            ),
            retry=Retry(),
        )
        self._state = state
        self._clock = clock
        self._passed: set[str] = set()  # addresses whose schedulers stood by when they were asked last
        self._endpoint: SharedChannel[GrpcChannel] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._connecting = asyncio.Lock()

    async def ask(self) -> None:
        """Take one answer in, of the scheduler that drives the executors if there is one. Raises PacelineError."""
        while True:
            endpoint = await self._connected(_CONNECT_SECONDS)
            overview = await self._overview(endpoint)
            self._dialler.served(endpoint)
            if overview.holder and len(self._addresses.known) > 1 and endpoint.address not in self._passed:
                self._passed.add(endpoint.address)
                self._leave(endpoint, UnavailableError(f"stands by for {overview.holder}", reason="STANDBY"))
                continue
            if not overview.holder:
                self._passed.clear()
            self._state.answered(endpoint.address, overview, self._clock())
            self._watch(endpoint)
            if overview.holder and len(self._addresses.known) > 1:
                # Nobody else was there. The next answer is asked of another one first.
                self._leave(endpoint, UnavailableError(f"stands by for {overview.holder}", reason="STANDBY"))
            return

    async def run(self, interval_s: float) -> None:
        """Ask every so often, for ever; a scheduler that is gone is trouble, and looked for. Raises what is none:
        AccessDeniedError, WrongServerError.
        """
        loop = asyncio.get_running_loop()
        while True:
            next_s = loop.time() + interval_s
            try:
                await self.ask()
            except (AccessDeniedError, WrongServerError):
                raise
            except PacelineError as error:
                self._state.lost(str(error))
                next_s = loop.time()  # connecting took its time
            await asyncio.sleep(max(0.05, next_s - loop.time()))

    async def call(self, make: Callable[[CallChannel, float], Awaitable[AnswerT]]) -> AnswerT:
        """Make a call of an operator's to the scheduler that was asked last. Raises PacelineError."""
        return await self._made(make, await self._connected(_CONNECT_SECONDS))

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self._dialler.close()

    async def _made(
        self, make: Callable[[CallChannel, float], Awaitable[AnswerT]], endpoint: SharedChannel[GrpcChannel]
    ) -> AnswerT:
        try:
            with self._dialler.use(endpoint) as channel, errors_of_calls():
                return await make(channel.calls, _CALL_SECONDS)
        except UnsupportedError as error:
            raise WrongServerError(
                f"{endpoint.address} is not the admin port of a scheduler of this version: say --admin-target",
                reason="WRONG_SERVER",
            ) from error

    async def _connected(self, seconds: float) -> SharedChannel[GrpcChannel]:
        async with self._connecting:
            self._endpoint = await self._dialler.connect(asyncio.get_running_loop().time() + seconds)
            return self._endpoint

    async def _overview(self, endpoint: SharedChannel[GrpcChannel]) -> Overview:
        try:
            return await self._made(wire.overview, endpoint)
        except (AccessDeniedError, WrongServerError):
            raise
        except PacelineError as error:
            self._leave(endpoint, error)
            raise

    def _leave(self, endpoint: SharedChannel[GrpcChannel], error: PacelineError) -> None:
        self._dialler.turned_away(endpoint, error)

    def _watch(self, endpoint: SharedChannel[GrpcChannel]) -> None:
        name = f"steps of {endpoint.address}"
        if self._watching is not None and not self._watching.done():
            if self._watching.get_name() == name:
                return
            self._watching.cancel()
        self._watching = asyncio.create_task(self._watch_steps(endpoint), name=name)

    async def _watch_steps(self, endpoint: SharedChannel[GrpcChannel]) -> None:
        """Until the call fails: then the next answer begins another one, if there is still a scheduler."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError), self._dialler.use(endpoint) as channel:
            async for step in wire.steps(channel.calls):
                self._state.stepped(step, self._clock())

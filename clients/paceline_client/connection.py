"""The way to one target: a channel that is remade when it breaks, and the session that takes new requests.

Knows how to connect, how long to try, and when a session no longer takes requests. Refuses to know requests.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from paceline_client import wire
from paceline_client.config import Keepalive, Limits, Retry, Tls
from paceline_client.errors import ClientClosedError, ConnectFailedError
from paceline_client.session import Session, SessionState

# One attempt: a host that drops packets must not use up the whole time.
_ATTEMPT_SECONDS = 3.0
# A server that drains keeps its sessions until their requests are done; a client that meets more than this many
# drains at once gives up the oldest.
_MAX_DRAINING_SESSIONS = 8
# What gRPC writes before the reason: a status and the address, which is in the message already.
_GRPC_PREFIXES = re.compile(r"^(?:[A-Z_]+: )?(?:ipv[46]:\S+: )?")


class Connection:
    """Opens channels and sessions on demand, for one target. Made and used on one event loop."""

    def __init__(self, target: str, *, tls: Tls | None, retry: Retry, keepalive: Keepalive, limits: Limits) -> None:
        self._target = target
        self._tls = tls
        self._retry = retry
        self._keepalive = keepalive
        self._limits = limits
        self._channel: grpc.aio.Channel | None = None
        self._session: Session | None = None
        self._draining: list[Session] = []
        self._connecting = asyncio.Lock()
        self._num_failures = 0
        self._is_closed = False

    @property
    def target(self) -> str:
        """Where this connects to, for messages."""
        return self._target

    async def channel(self, *, connect_seconds: float) -> grpc.aio.Channel:
        """A channel that is connected. `ConnectFailedError` when none can be made in time."""
        async with self._turn(connect_seconds) as deadline:
            return await self._connect(deadline)

    async def session(self, *, connect_seconds: float) -> Session:
        """A session that takes requests. `ConnectFailedError` when none can be made in time."""
        if self._session is not None and self._session.state is SessionState.OPEN:
            return self._session
        async with self._turn(connect_seconds) as deadline:
            return await self._open_session(deadline)

    @contextlib.asynccontextmanager
    async def _turn(self, connect_seconds: float) -> AsyncIterator[float]:
        """One caller connects at a time, the others wait for what it brings; yields the time to be done by."""
        deadline = time.monotonic() + connect_seconds
        try:
            async with asyncio.timeout(connect_seconds), self._connecting:
                yield deadline
        except TimeoutError:
            raise self._connect_failed("no answer in time") from None

    async def close(self) -> None:
        """End every session and the channel. Nothing can be asked for afterwards."""
        self._is_closed = True
        sessions = [*self._draining, *([self._session] if self._session else [])]
        await asyncio.gather(*(session.close() for session in sessions))
        if self._channel is not None:
            await self._channel.close()

    async def _open_session(self, deadline: float) -> Session:
        if self._session is not None and self._session.state is SessionState.OPEN:
            # Another request opened it while this one waited for its turn.
            return self._session
        await self._set_aside()
        channel = await self._connect(deadline)
        self._session = Session(wire.open_session(channel), keepalive=self._keepalive, limits=self._limits)
        return self._session

    async def _set_aside(self) -> None:
        """Make room for a new session: a draining one finishes its requests beside it, an ended one counts."""
        last, self._session = self._session, None
        self._draining = [session for session in self._draining if session.state is not SessionState.ENDED]
        if last is None:
            return
        if last.state is SessionState.DRAINING:
            self._draining.append(last)
            if len(self._draining) > _MAX_DRAINING_SESSIONS:
                await self._draining.pop(0).close()
        elif last.was_answered:
            self._num_failures = 0
        else:
            self._num_failures += 1
        if self._num_failures:
            await asyncio.sleep(self._retry.delay_seconds(self._num_failures))

    async def _connect(self, deadline: float) -> grpc.aio.Channel:
        while True:
            if self._is_closed:
                raise ClientClosedError("the client is closed")
            channel = self._channel or wire.open_channel(self._target, self._tls)
            self._channel = channel
            if await _becomes_ready(channel, min(_ATTEMPT_SECONDS, deadline - time.monotonic())):
                return channel
            self._num_failures += 1
            pause = self._retry.delay_seconds(self._num_failures)
            if time.monotonic() + pause >= deadline:
                raise self._connect_failed(await _why(channel))
            # A new channel for the next attempt: gRPC's own pauses of the old one do not apply to it.
            self._channel = None
            await channel.close()
            await asyncio.sleep(pause)

    def _connect_failed(self, why: str) -> ConnectFailedError:
        return ConnectFailedError(f"cannot reach {self._target}: {why}", reason="CONNECT_FAILED")


async def _becomes_ready(channel: grpc.aio.Channel, seconds: float) -> bool:
    """Whether the channel connects: False as soon as an attempt of its failed, or after this long."""
    try:
        async with asyncio.timeout(seconds):
            while True:
                state = channel.get_state(try_to_connect=True)
                if state is grpc.ChannelConnectivity.READY:
                    return True
                if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
                    return False
                await channel.wait_for_state_change(state)
    except (TimeoutError, grpc.aio.UsageError):
        # The second: the channel was closed meanwhile, together with the client.
        return False


async def _why(channel: grpc.aio.Channel) -> str:
    """The reason a channel does not connect, which only a call on it tells."""
    try:
        await wire.list_models(channel, timeout_seconds=0.5)
    except grpc.aio.AioRpcError as error:
        details = error.details() or error.code().name
        return _GRPC_PREFIXES.sub("", details.rpartition("last error: ")[2])
    return "the connection came up too late"

"""The way to one target: a channel that is dialled again when it breaks, and the session that takes requests.

Knows how to connect, how long to try, and when a session no longer takes requests. Refuses to know requests, but for
the names of those that were left while there was nobody to tell.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

from paceline_client.channel import Channel
from paceline_client.config import Keepalive, Limits, Retry
from paceline_client.errors import ClientClosedError, ConnectFailedError
from paceline_client.session import Session, SessionState

# One attempt: a host that drops packets must not use up the whole time.
_ATTEMPT_SECONDS = 3.0
# Where the next pause is longer than the time that is left the last attempt is made so long before its end.
_LAST_ATTEMPT_SECONDS = 0.5
# A server that drains keeps its sessions until their requests are done; a client that meets more than this many
# drains at once gives up the oldest, and its requests go on elsewhere.
_MAX_DRAINING_SESSIONS = 8
# Servers keep a request without a client for 30 s: after that there is nothing left to cancel.
_CANCEL_WINDOW_SECONDS = 30.0

ChannelT_co = TypeVar("ChannelT_co", bound=Channel, covariant=True)


class Connection(Generic[ChannelT_co]):
    """Opens channels and sessions on demand, for one target. Used on one event loop.

    `target` is for messages only; `dial` makes a channel, which has not connected yet.
    """

    def __init__(
        self, target: str, *, dial: Callable[[], ChannelT_co], retry: Retry, keepalive: Keepalive, limits: Limits
    ) -> None:
        self._target = target
        self._dial = dial
        self._retry = retry
        self._keepalive = keepalive
        self._limits = limits
        self._channel: ChannelT_co | None = None
        self._session: Session | None = None
        self._draining: list[tuple[Session, Channel]] = []
        self._left: dict[tuple[str, str], float] = {}  # tenant and id of requests to cancel, and until when
        self._connecting = asyncio.Lock()
        self._num_failures = 0
        self._closed = asyncio.Event()

    @property
    def limits(self) -> Limits:
        """What the client holds at most."""
        return self._limits

    async def channel(self, *, connect_seconds: float) -> ChannelT_co:
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
        deadline = asyncio.get_running_loop().time() + connect_seconds
        try:
            async with asyncio.timeout(connect_seconds), self._connecting:
                yield deadline
        except TimeoutError:
            raise self._connect_failed("no answer in time") from None

    async def pause(self, seconds: float) -> None:
        """Wait for so long; `ClientClosedError` as soon as the client is closed."""
        if seconds > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._closed.wait()
        if self._closed.is_set():
            raise ClientClosedError("the client is closed")

    def cancel_later(self, tenant: str, request_id: str) -> None:
        """Cancel a request that no session of this client has: now, or when the next session opens."""
        if self._session is not None and self._session.state is SessionState.OPEN:
            self._session.cancel(tenant, request_id)
            return
        if len(self._left) >= self._limits.max_concurrent_requests:
            del self._left[next(iter(self._left))]
        self._left[tenant, request_id] = asyncio.get_running_loop().time() + _CANCEL_WINDOW_SECONDS

    async def close(self) -> None:
        """End every session and the channels. Nothing can be asked for afterwards."""
        self._closed.set()
        sessions = [session for session, _ in self._draining]
        channels = [channel for _, channel in self._draining]
        if self._session is not None:
            sessions.append(self._session)
        if self._channel is not None:
            channels.append(self._channel)
        await asyncio.gather(*(session.close() for session in sessions))
        for channel in channels:
            await channel.close()

    async def _open_session(self, deadline: float) -> Session:
        if self._session is not None and self._session.state is SessionState.OPEN:
            # Another request opened it while this one waited for its turn.
            return self._session
        await self._set_aside()
        channel = await self._connect(deadline)
        self._session = Session(channel.open_session(), keepalive=self._keepalive, limits=self._limits)
        now = asyncio.get_running_loop().time()
        for (tenant, request_id), until in self._left.items():
            if now < until:
                self._session.cancel(tenant, request_id)
        self._left.clear()
        return self._session

    async def _set_aside(self) -> None:
        """Make room for a new session: a draining one finishes its requests beside it, an ended one counts.

        Neither leaves its channel to the new one: that leads to a server that is going away, or to nowhere.
        """
        last, self._session = self._session, None
        if last is not None:
            channel, self._channel = self._channel, None
            if channel is not None:
                self._draining.append((last, channel))
            self._num_failures = 0 if last.was_answered else self._num_failures + 1
        await self._tidy()
        if self._num_failures:
            await self.pause(self._retry.delay_seconds(self._num_failures))

    async def _tidy(self) -> None:
        """Close the channels of sessions that have nothing more to finish, and the oldest of too many others."""
        busy = [pair for pair in self._draining if pair[0].state is SessionState.DRAINING and pair[0].num_running]
        for pair in [pair for pair in self._draining if pair not in busy[-_MAX_DRAINING_SESSIONS:]]:
            session, channel = pair
            await session.abandon()
            await channel.close()
            self._draining.remove(pair)

    async def _connect(self, deadline: float) -> ChannelT_co:
        loop = asyncio.get_running_loop()
        while True:
            await self.pause(0.0)
            channel = self._channel = self._channel or self._dial()
            if await channel.becomes_ready(min(_ATTEMPT_SECONDS, deadline - loop.time())):
                return channel
            self._num_failures += 1
            pause, room = self._retry.delay_seconds(self._num_failures), deadline - loop.time()
            if pause >= room:
                pause = room - _LAST_ATTEMPT_SECONDS
            is_last = pause <= 0
            why = await channel.why_not_ready() if is_last else ""
            # A new channel for the next attempt: gRPC's own pauses of the old one do not apply to it.
            self._channel = None
            await channel.close()
            if is_last:
                raise self._connect_failed(why)
            await self.pause(pause)

    def _connect_failed(self, why: str) -> ConnectFailedError:
        return ConnectFailedError(f"cannot reach {self._target}: {why}", reason="CONNECT_FAILED")

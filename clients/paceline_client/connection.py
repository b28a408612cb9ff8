"""One channel for all that is new, and the session that takes requests.

Knows when a session no longer takes requests, and what that says of its server. Refuses to know requests, but for the
names of those that were left while there was nobody to tell.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from typing import Generic

from paceline_client.addresses import Addresses
from paceline_client.config import Keepalive, Limits, Retry
from paceline_client.dialler import ChannelT_co, Dialler, SharedChannel
from paceline_client.errors import PacelineError, UnsupportedError, WrongServerError
from paceline_client.session import EndCause, Session, SessionEnd, SessionState

# A server that drains keeps its sessions until their requests are done; a client that meets more than this many
# drains at once gives up the oldest, and its requests go on elsewhere.
_MAX_DRAINING_SESSIONS = 8
# Servers keep a request without a client for 30 s: after that there is nothing left to cancel.
_CANCEL_WINDOW_SECONDS = 30.0


class Connection(Generic[ChannelT_co]):
    """Connects to one of several addresses at a time, on one event loop. `dial` makes a channel, not connected yet."""

    def __init__(
        self,
        addresses: Addresses,
        *,
        dial: Callable[[str], ChannelT_co],
        retry: Retry,
        keepalive: Keepalive,
        limits: Limits,
    ) -> None:
        self._dialler = Dialler(addresses, dial=dial, retry=retry)
        self._keepalive = keepalive
        self._limits = limits
        self._session: Session | None = None
        self._session_endpoint: SharedChannel[ChannelT_co] | None = None
        self._draining: list[tuple[Session, SharedChannel[ChannelT_co]]] = []
        self._left: dict[tuple[str, str], float] = {}  # tenant and id of requests to cancel, and since when
        self._connecting = asyncio.Lock()

    @property
    def limits(self) -> Limits:
        return self._limits

    @property
    def trouble(self) -> str:
        return self._dialler.trouble

    async def endpoint(
        self, *, connect_seconds: float, refused_seconds: float = math.inf
    ) -> SharedChannel[ChannelT_co]:
        """A channel that is connected. `ConnectFailedError` when none can be made in time.

        `refused_seconds` is that time where every address answers that nothing is there.
        """
        refused_deadline = asyncio.get_running_loop().time() + refused_seconds
        async with self._turn(connect_seconds) as deadline:
            return await self._dialler.connect(deadline, refused_deadline_s=refused_deadline)

    def use(self, endpoint: SharedChannel[ChannelT_co]) -> AbstractContextManager[ChannelT_co]:
        """Make a short call on the channel: it stays open meanwhile, whatever becomes of its server."""
        return self._dialler.use(endpoint)

    async def session(self, *, connect_seconds: float, refused_seconds: float = math.inf) -> Session:
        """`ConnectFailedError` when none can be made in time; see `endpoint`."""
        if self._session is not None and self._session.state is SessionState.OPEN:
            return self._session
        refused_deadline = asyncio.get_running_loop().time() + refused_seconds
        async with self._turn(connect_seconds) as deadline:
            return await self._open_session(deadline, refused_deadline)

    async def explained(
        self, error: PacelineError, endpoint: SharedChannel[ChannelT_co] | None = None
    ) -> PacelineError:
        """A refusal that is gRPC's own, as an error that says whose port it is; any other error as it is."""
        asked = endpoint or self._session_endpoint
        if type(error) is not UnsupportedError or error.reason is not None or error.violations or asked is None:
            return error
        what = await asked.channel.what_serves()
        return WrongServerError(f"{asked.address} is {what}", reason="WRONG_SERVER") if what else error

    def served(self, endpoint: SharedChannel[ChannelT_co]) -> None:
        self._dialler.served(endpoint)

    def turned_away(self, endpoint: SharedChannel[ChannelT_co], error: PacelineError) -> None:
        """Leave a server that did not answer, or names another one."""
        self._dialler.turned_away(endpoint, error)

    async def pause(self, seconds: float) -> None:
        await self._dialler.pause(seconds)

    def cancel_later(self, tenant: str, request_id: str) -> None:
        """Cancels now and in later sessions until one has output: a standby, say, does not hear of it."""
        if self._session is not None and self._session.state is SessionState.OPEN:
            self._session.cancel(tenant, request_id)
            if self._session.had_output:
                return
        if len(self._left) >= self._limits.max_concurrent_requests:
            del self._left[next(iter(self._left))]
        self._left[tenant, request_id] = asyncio.get_running_loop().time()

    def keep(self, tenant: str, request_id: str) -> None:
        """The request is sent again: nothing cancels it any more."""
        self._left.pop((tenant, request_id), None)

    async def close(self) -> None:
        """Nothing can be asked for afterwards."""
        await self._dialler.stop()
        async with self._connecting:
            # Whoever was connecting has given up.
            sessions = [session for session, _ in self._draining]
            if self._session is not None:
                sessions.append(self._session)
        await asyncio.gather(*(session.close() for session in sessions))
        await self._dialler.close()

    @contextlib.asynccontextmanager
    async def _turn(self, connect_seconds: float) -> AsyncIterator[float]:
        """One caller connects at a time, the others wait for what it brings; yields the deadline."""
        deadline = asyncio.get_running_loop().time() + connect_seconds
        try:
            async with asyncio.timeout(connect_seconds), self._connecting:
                yield deadline
        except TimeoutError:
            raise self._dialler.failure() from None

    # Sessions

    async def _open_session(self, deadline: float, refused_deadline: float) -> Session:
        if self._session is not None and self._session.state is SessionState.OPEN:
            # Another request opened it meanwhile.
            return self._session
        await self._set_aside()
        endpoint = self._session_endpoint = await self._dialler.connect(deadline, refused_deadline_s=refused_deadline)
        self._dialler.hold(endpoint)
        is_token_replaced = endpoint.channel.token_watch()
        self._session = Session(
            endpoint.channel.open_session(), is_token_replaced, keepalive=self._keepalive, limits=self._limits
        )
        now = asyncio.get_running_loop().time()
        self._left = {name: at_s for name, at_s in self._left.items() if now < at_s + _CANCEL_WINDOW_SECONDS}
        for tenant, request_id in self._left:
            self._session.cancel(tenant, request_id)
        return self._session

    async def _set_aside(self) -> None:
        """A draining session finishes its requests beside the new one, on a channel of its own."""
        last, self._session = self._session, None
        endpoint, self._session_endpoint = self._session_endpoint, None
        if last is not None and endpoint is not None:
            self._draining.append((last, endpoint))
            self._dialler.leave(endpoint)
            if last.end is not None:
                self._note_end(endpoint.address, last.end)
            if last.end is not None and last.end.had_output:
                # It served, and was told of all of these.
                self._left = {name: at_s for name, at_s in self._left.items() if at_s >= last.end.at_s}
        await self._tidy()

    async def _tidy(self) -> None:
        """End sessions that have nothing more to finish, and the oldest of too many others."""
        busy = [pair for pair in self._draining if pair[0].state is SessionState.DRAINING and pair[0].num_running]
        for pair in [pair for pair in self._draining if pair not in busy[-_MAX_DRAINING_SESSIONS:]]:
            session, endpoint = pair
            self._draining.remove(pair)
            try:
                await session.abandon()
            finally:
                self._dialler.release(endpoint)

    def _note_end(self, address: str, end: SessionEnd) -> None:
        match end.cause:
            case EndCause.BROKEN:
                self._dialler.broke(address, end.at_s)
            case EndCause.DRAINING if end.had_output:
                self._dialler.went_away(address, end.at_s)
            case EndCause.TURNED_AWAY:
                if end.had_output:
                    self._dialler.went_away(address, end.at_s)
                self._dialler.refused(address, end.error, end.at_s)
            case _:
                self._dialler.failed(address, str(end.error), end.at_s)

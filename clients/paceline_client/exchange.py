"""One request from its first attempt to its result.

Knows when a refused request is sent again and when its time is up. Refuses to know streams and bytes; the connection
gives it a session, the session an inbox.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator

from paceline_client.config import Retry, Timeout
from paceline_client.connection import Connection
from paceline_client.errors import (
    OverloadedError,
    PacelineError,
    RequestCancelledError,
    RequestTimeoutError,
    UnavailableError,
)
from paceline_client.inbox import Inbox
from paceline_client.requests import Request
from paceline_client.results import Delta, Result
from paceline_client.session import Session


class _Clock:
    """The time of one request, counted from when its output is first asked for."""

    def __init__(self, timeout: Timeout) -> None:
        self._timeout = timeout
        self._started = time.monotonic()

    def remaining_seconds(self) -> float | None:
        """None where the request may take for ever."""
        total = self._timeout.total_seconds
        return None if total is None else max(self._started + total - time.monotonic(), 0.0)

    def connect_seconds(self) -> float:
        """How long connecting may take: its own limit, or what is left of the request's."""
        remaining = self.remaining_seconds()
        return self._timeout.connect_seconds if remaining is None else min(self._timeout.connect_seconds, remaining)


class Exchange:
    """Runs one request. Only a refusal before the first token is tried again: nothing is ever generated twice."""

    def __init__(self, connection: Connection, request: Request, retry: Retry) -> None:
        self._connection = connection
        self._request = request
        self._retry = retry
        self._inbox: Inbox | None = None
        self._end: Result | PacelineError | None = None

    @property
    def has_begun(self) -> bool:
        """Whether output has arrived: from then on `leave` wakes the one that waits for more of it."""
        return self._inbox is not None

    @property
    def end(self) -> Result | PacelineError | None:
        """The result once every delta was read, the error that came instead, or None while neither is there."""
        return self._end

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """The deltas in order. Leaving early, by whatever way, cancels the request on the server."""
        clock = _Clock(self._request.timeout)
        try:
            session, inbox, received = await self._begin(clock)
            try:
                self._inbox = inbox
                while isinstance(received, Delta):
                    yield received
                    received = await self._next(inbox, clock)
                self._end = received
            finally:
                session.release(inbox)
        except PacelineError as error:
            self._end = error
            raise
        finally:
            self.leave()

    def leave(self) -> None:
        """Nobody reads on: what has no end now never gets one."""
        if self._end is None:
            self._end = RequestCancelledError(
                f"request {self._request.request_id} was left before its end, which cancelled it", reason="LEFT"
            )
            if self._inbox is not None:
                self._inbox.fail(self._end)

    async def _begin(self, clock: _Clock) -> tuple[Session, Inbox, Delta | Result]:
        """Send the request, again if need be, until its first delta arrives."""
        for num_attempts in itertools.count(1):
            try:
                return await self._attempt(clock)
            except (OverloadedError, UnavailableError) as error:
                pause = pause_before_retry(error, num_attempts, self._retry, clock.remaining_seconds())
                if pause is None:
                    raise
            await asyncio.sleep(pause)
        raise AssertionError("unreachable: the attempts end with an error")

    async def _attempt(self, clock: _Clock) -> tuple[Session, Inbox, Delta | Result]:
        session = await self._connection.session(connect_seconds=clock.connect_seconds())
        inbox = session.submit(self._request)
        try:
            return session, inbox, await self._next(inbox, clock)
        except BaseException:
            session.release(inbox)
            raise

    async def _next(self, inbox: Inbox, clock: _Clock) -> Delta | Result:
        remaining = clock.remaining_seconds()
        if remaining is None or not inbox.is_empty:
            # No limit, or nothing to wait for: asyncio.timeout would cost more time than the reading.
            return await inbox.get()
        try:
            async with asyncio.timeout(remaining):
                return await inbox.get()
        except TimeoutError:
            raise RequestTimeoutError(
                f"request {inbox.request_id} did not finish within {self._request.timeout.total_seconds} s",
                reason="TIMEOUT",
            ) from None


def pause_before_retry(
    error: PacelineError, num_attempts: int, retry: Retry, remaining_seconds: float | None
) -> float | None:
    """Seconds to wait before the next attempt at a request that was refused, or None when the error is final."""
    # Exactly these two: a lost connection may have cost tokens, a failed one was tried for long enough.
    if type(error) not in (OverloadedError, UnavailableError) or num_attempts >= retry.max_attempts:
        return None
    asked = error.retry_after or 0.0
    if asked > retry.max_delay_seconds:
        return None
    pause = max(asked, retry.delay_seconds(num_attempts))
    return None if remaining_seconds is not None and pause >= remaining_seconds else pause

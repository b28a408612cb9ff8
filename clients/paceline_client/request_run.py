"""One request from its first attempt to its result, over as many sessions as that takes.

Knows when the request's time is up, and carries it to another session when the one that had it broke off. Refuses to
know streams and bytes; the connection gives it a session, the session fills its inbox, and `recovery` says what
becomes of it after a failure.
"""

import asyncio
import math
from collections.abc import AsyncGenerator
from dataclasses import replace

from paceline_client.channel import Channel
from paceline_client.config import Retry, Timeout
from paceline_client.connection import Connection
from paceline_client.errors import PacelineError, RequestCancelledError, RequestTimeoutError
from paceline_client.inbox import Inbox, Interrupted
from paceline_client.recovery import FailureContext, Recovery, is_final, may_be_known_after
from paceline_client.requests import GenerationRequest
from paceline_client.results import Delta, Result
from paceline_client.session import Session


class _Clock:
    """Counts from when the output is first asked for."""

    def __init__(self, timeout: Timeout) -> None:
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time()
        self._total = math.inf if timeout.total_seconds is None else timeout.total_seconds

    def now_s(self) -> float:
        return self._loop.time()

    def remaining_seconds(self) -> float | None:
        """None: no limit."""
        return None if math.isinf(self._total) else max(self._started + self._total - self._loop.time(), 0.0)


class RequestRun:
    """Sent again it says what has arrived, so nothing is ever delivered twice.

    It goes on elsewhere when more output is asked for, and not before: who does not read needs no more.
    """

    def __init__(self, connection: Connection[Channel], request: GenerationRequest, retry: Retry) -> None:
        self._connection = connection
        max_outage_seconds = request.timeout.total_seconds or retry.max_outage_seconds
        self._request = replace(request, max_outage_seconds=max_outage_seconds)
        self._recovery = Recovery(retry, is_idempotent=request.is_idempotent)
        self._inbox = Inbox(
            request.request_id,
            max_buffered_tokens=connection.limits.max_buffered_tokens,
            num_completions=request.num_completions,
        )
        self._session: Session | None = None  # that has the request
        self._pause_seconds = 0.0  # before it is sent
        self._attaching: asyncio.Timeout | None = None
        self._end: Result | PacelineError | None = None

    @property
    def end(self) -> Result | PacelineError | None:
        """The result is there once every delta was read."""
        return self._end

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Leaving early, by whatever way, cancels the request on the server."""
        clock = _Clock(self._request.timeout)
        try:
            received = await self._next(clock)
            while isinstance(received, Delta):
                yield received
                received = await self._next(clock)
            self._end = replace(received, structured=self._request.structured)
        except PacelineError as error:
            self._end = await self._connection.explained(error)
            raise self._end from None
        finally:
            self.leave()
            self._cancel()

    def leave(self) -> None:
        """Nobody reads on: what has no end now never gets one, and whoever waits for more gets an error."""
        if self._end is None:
            self._end = RequestCancelledError(
                f"request {self._request.request_id} was left before its end, which cancelled it", reason="LEFT"
            )
            self._inbox.fail(self._end)
            if self._attaching is not None:
                self._attaching.reschedule(asyncio.get_running_loop().time())

    def _cancel(self) -> None:
        if self._session is not None and self._session.release(self._inbox):
            return
        error = self._inbox.interruption
        if error is None or is_final(error):
            return
        if self._recovery.may_be_known or may_be_known_after(error, self._inbox.num_tokens):
            self._connection.cancel_later(self._request.tenant, self._request.request_id)

    async def _next(self, clock: _Clock) -> Delta | Result:
        while True:
            if self._session is None:
                await self._attach(clock)
            try:
                return await self._read(clock)
            except Interrupted as interrupted:
                self._pause_seconds = self._pause_after(interrupted.error, clock)
                self._session = None

    async def _attach(self, clock: _Clock) -> None:
        try:
            # Without a limit of its own: `leave` sets one, which has passed.
            async with asyncio.timeout(None) as self._attaching:
                while not await self._try_to_attach(clock):
                    pass
        except TimeoutError:
            if self._end is None:
                raise
            # It was left, and who reads will hear of it.
        finally:
            self._attaching = None

    async def _try_to_attach(self, clock: _Clock) -> bool:
        try:
            await self._connection.pause(self._pause_seconds)
            connect_seconds = self._recovery.seconds_to_connect(
                clock.now_s(), self._request.timeout.connect_seconds, clock.remaining_seconds()
            )
            session = await self._connection.session(
                connect_seconds=connect_seconds,
                refused_seconds=math.inf if self._recovery.is_in_outage else self._request.timeout.refused_seconds,
            )
            session.submit(self._request, self._inbox, *self._recovery.next_attachment(clock.now_s()))
            self._connection.keep(self._request.tenant, self._request.request_id)
        except PacelineError as error:
            self._pause_seconds = self._pause_after(error, clock)
            return False
        self._recovery.sent(clock.now_s())
        self._inbox.go_on()
        self._session = session
        return True

    def _pause_after(self, error: PacelineError, clock: _Clock) -> float:
        """Raises the error that ends the request."""
        return self._recovery.pause_after(
            error,
            FailureContext(
                now_s=clock.now_s(),
                num_tokens=self._inbox.num_tokens,
                was_answered=self._session is not None and self._session.was_answered,
                remaining_seconds=clock.remaining_seconds(),
            ),
        )

    async def _read(self, clock: _Clock) -> Delta | Result:
        remaining = clock.remaining_seconds()
        if remaining is None or not self._inbox.is_empty:
            # No limit, or nothing to wait for: asyncio.timeout would cost more time than the reading.
            return await self._inbox.get()
        try:
            async with asyncio.timeout(remaining):
                return await self._inbox.get()
        except TimeoutError:
            raise RequestTimeoutError(
                f"request {self._request.request_id} did not finish within {self._request.timeout.total_seconds} s",
                reason="TIMEOUT",
            ) from None

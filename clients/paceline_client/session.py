"""One Session stream: many requests out, the output of all of them in.

Knows which requests run on this stream and whether its server is alive. Refuses to know how the stream was opened and
what happens after it ends: the inbox of every request that still runs then gets an error.

A request's life here: `submit` → deltas into its inbox → finish (acknowledged with the next heartbeat), failure, or
`release` by the caller, which cancels it on the server.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import grpc
import grpc.aio

from paceline_client import wire
from paceline_client.config import Keepalive, Limits
from paceline_client.errors import (
    ClientClosedError,
    ConnectionLostError,
    OverloadedError,
    PacelineError,
    ServerError,
    UnavailableError,
)
from paceline_client.inbox import Inbox
from paceline_client.requests import GenerationRequest, invalid

# Statuses that say nothing about a request, only that the stream is gone.
_CONNECTION_STATUSES = frozenset(
    {
        grpc.StatusCode.OK,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)
NOT_HERE = frozenset({"STANDBY", "GIVEN_UP", "DRAINING"})
"""The server is not, or no longer, the one to ask; elsewhere there may be one that is."""
# About one request: behind the same name there may be a server that has one, but what runs here stays here.
_NOT_THIS_MODEL_HERE = "NO_EXECUTOR"
_FAREWELL_SECONDS = 0.5
NOT_TAKEN = "SESSION_NOT_TAKEN"
"""The session ended before the server had said anything."""

ErrorFactory = Callable[[], PacelineError]


class SessionState(Enum):
    OPEN = "open"
    DRAINING = "draining"
    """The server takes no new requests here and ends the stream when the running ones are done."""
    ENDED = "ended"


class EndCause(Enum):
    UNANSWERED = "unanswered"
    """The server had said nothing."""
    BROKEN = "broken"
    """Or fell silent."""
    DRAINING = "draining"
    """The server is going, or has no executor for all that was asked of it."""
    TURNED_AWAY = "turned away"
    """The server is not the one to ask: see `SessionEnd.error`."""


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """`at_s` is the event loop's time."""

    cause: EndCause
    at_s: float
    error: PacelineError
    had_output: bool


@dataclass(slots=True)
class _Running:
    """Its end has not arrived; these completions still owe theirs."""

    request: GenerationRequest
    inbox: Inbox
    owed_finishes: set[int]


class Session:
    """Everything runs on the event loop it was made on. `is_token_replaced`: since the call was made."""

    def __init__(
        self, call: wire.SessionCall, is_token_replaced: Callable[[], bool], *, keepalive: Keepalive, limits: Limits
    ) -> None:
        self._call = call
        self._is_token_replaced = is_token_replaced
        self._keepalive = keepalive
        self._limits = limits
        self._running: dict[str, _Running] = {}
        # Bounded by `submit`: a request leaves at most itself and its cancellation here.
        self._outbox: asyncio.Queue[wire.SessionRequest] = asyncio.Queue()
        self._unacknowledged: list[str] = []
        # Of requests that were left: the completions whose ends the server still owes. It pays, or the session breaks.
        self._owed_finishes: dict[str, set[int]] = {}
        self._was_answered = False
        self._had_output = False
        self._end: SessionEnd | None = None
        self._num_silent_beats = 0
        self._state = SessionState.OPEN
        self._task = asyncio.create_task(self._run(), name="paceline-session")

    @property
    def state(self) -> SessionState:
        """Only an open session takes new requests."""
        return self._state

    @property
    def end(self) -> SessionEnd | None:
        """None while it takes requests."""
        return self._end

    @property
    def was_answered(self) -> bool:
        return self._was_answered

    @property
    def had_output(self) -> bool:
        return self._had_output

    @property
    def num_running(self) -> int:
        return len(self._running)

    def submit(self, request: GenerationRequest, inbox: Inbox, number: int, waited_seconds: float) -> None:
        """As the attachment of this number, with what the inbox holds. `OverloadedError` at the limit of running
        requests or of unsent messages, `InvalidRequestError` for an id that runs here already or has just been left,
        and for what no message can hold.
        """
        if request.request_id in self._running:
            raise invalid("request_id", f"request {request.request_id!r} is running in this session already")
        if request.request_id in self._owed_finishes:
            # Its end would be taken for that of the new one.
            sentence = f"request {request.request_id!r} was left, and its end has not arrived yet; choose another id"
            raise invalid("request_id", sentence)
        if max(len(self._running), self._outbox.qsize()) >= self._limits.max_concurrent_requests:
            raise OverloadedError(
                f"this client runs {len(self._running)} requests and has {self._outbox.qsize()} messages to send; "
                f"Limits.max_concurrent_requests is {self._limits.max_concurrent_requests}",
                reason="CLIENT_LIMIT",
            )
        held, max_bytes = inbox.held(), self._limits.max_request_bytes
        message = wire.generate_message(request, held, number, waited_seconds, max_bytes=max_bytes)
        if request.request_id in self._unacknowledged:
            # The id is used again: its earlier end must not be acknowledged after the new beginning.
            self._acknowledge()
        finished = {each.index for each in held if each.is_finished}
        self._running[request.request_id] = _Running(request, inbox, set(range(request.num_completions)) - finished)
        self._outbox.put_nowait(message)

    def release(self, inbox: Inbox) -> bool:
        """Cancel a request that still runs; False when it does not run here. Never blocks, never fails."""
        running = self._running.get(inbox.request_id)
        if running is None or running.inbox is not inbox:
            return False
        del self._running[inbox.request_id]
        self._owed_finishes[inbox.request_id] = running.owed_finishes
        self.cancel(running.request.tenant, inbox.request_id)
        return True

    def cancel(self, tenant: str, request_id: str) -> None:
        """Cancels it whichever session has it."""
        self._outbox.put_nowait(wire.cancel_message(tenant, request_id))

    async def close(self) -> None:
        """Running requests fail with `ClientClosedError` and are cancelled."""
        for request_id, running in self._running.items():
            self.cancel(running.request.tenant, request_id)
        self._end_all(lambda: ClientClosedError("the client was closed while the request ran"))
        self._acknowledge()
        farewell = asyncio.create_task(self._finish_writing())
        # The server ends the stream when it has read all of this.
        await asyncio.wait([self._task], timeout=_FAREWELL_SECONDS)
        farewell.cancel()
        self._task.cancel()
        await asyncio.wait([farewell, self._task])

    async def abandon(self) -> None:
        """At once, without cancelling its requests: to them the connection was lost."""
        self._task.cancel()
        await asyncio.wait([self._task])

    # The stream

    async def _run(self) -> None:
        end: ErrorFactory = lambda: ConnectionLostError("the session ended")  # noqa: E731  replaced by a better one
        reader, heart = asyncio.create_task(self._read()), asyncio.create_task(self._beat())
        writer = asyncio.create_task(self._write())
        try:
            # What stops the writer stops the reader as well, which then holds the status that says why.
            await asyncio.wait([reader, heart], return_when=asyncio.FIRST_COMPLETED)
            end = (reader if reader.done() else heart).result()
        finally:
            # An abandoned call leaks inside gRPC, so it is cancelled on every way out.
            self._call.cancel()
            for task in (reader, writer, heart):
                task.cancel()
            await asyncio.gather(reader, writer, heart, return_exceptions=True)
            self._end_all(end)

    async def _read(self) -> ErrorFactory:
        try:
            while isinstance(response := await self._call.read(), wire.SessionResponse):
                self._num_silent_beats = 0
                self._was_answered = True
                self._dispatch(response)
            return self._end_by_status(grpc.StatusCode.OK, "")
        except grpc.aio.AioRpcError as error:
            if error.code() in _CONNECTION_STATUSES:
                return self._end_by_status(error.code(), error.details() or "")
            if error.code() is grpc.StatusCode.UNAUTHENTICATED and self._is_token_replaced():
                return self._end_by_status(error.code(), "its token was replaced while it was shown")
            refusal = error
            return lambda: wire.error_from_call(refusal)
        except grpc.aio.BaseError as error:  # from inside gRPC, where a connection broke under it
            return self._end_by_status(grpc.StatusCode.UNKNOWN, str(error))
        except asyncio.CancelledError:
            # gRPC raises this too when it is the server that ends the call with CANCELLED.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return self._end_by_status(grpc.StatusCode.CANCELLED, "")

    def _end_by_status(self, code: grpc.StatusCode, details: str) -> ErrorFactory:
        what = f"{code.name}: {details}" if details else code.name
        if not self._was_answered:
            return lambda: UnavailableError(f"the server did not take the session ({what})", reason=NOT_TAKEN)
        return lambda: ConnectionLostError(f"the connection to the server was lost ({what})")

    async def _write(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            while True:
                message = await self._outbox.get()
                await self._call.write(message)
                self._outbox.task_done()

    async def _finish_writing(self) -> None:
        await self._outbox.join()
        with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            await self._call.done_writing()

    async def _beat(self) -> ErrorFactory:
        # Silence is counted in heartbeats of our own: a stalled event loop makes none, and so blames nobody.
        max_silent_beats = self._keepalive.silence_seconds / self._keepalive.heartbeat_seconds
        while self._num_silent_beats < max_silent_beats:
            await asyncio.sleep(self._keepalive.heartbeat_seconds)
            self._num_silent_beats += 1
            if self._outbox.empty():
                self._acknowledge()
                self._outbox.put_nowait(wire.heartbeat_message())
        silence = self._keepalive.silence_seconds
        return lambda: ConnectionLostError(f"the connection to the server was lost (no sign of life for {silence} s)")

    def _acknowledge(self) -> None:
        for start in range(0, len(self._unacknowledged), wire.MAX_ACKNOWLEDGED_IDS):
            ids = self._unacknowledged[start : start + wire.MAX_ACKNOWLEDGED_IDS]
            self._outbox.put_nowait(wire.acknowledge_message(ids))
        self._unacknowledged.clear()

    # What arrives

    def _dispatch(self, response: wire.SessionResponse) -> None:
        deltas, failures = wire.read_deltas(response), wire.read_failures(response)
        for delta in deltas:
            self._deliver(delta)
        for request_id, error in failures:
            self._fail(request_id, error)
        for delta in deltas:
            if delta.finish is not None and delta.finish.reason is None:
                # Its failure was not beside it: better an error without a cause than a request that never ends.
                self._fail(delta.request_id, ServerError("the server ended the request with an error it did not name"))
        for _, error in failures:
            if error.reason in NOT_HERE:
                self._stop_taking(EndCause.TURNED_AWAY, error)
            elif error.reason == _NOT_THIS_MODEL_HERE and not self._running:
                self._stop_taking(EndCause.DRAINING, error)
        if (reason := wire.drain_reason(response)) is not None:
            self._stop_taking(EndCause.DRAINING, UnavailableError(f"the server drains: {reason}"))

    def _deliver(self, received: wire.ReceivedDelta) -> None:
        running = self._running.get(received.request_id)
        if running is None:
            # Released here while the delta was on its way.
            if received.finish is not None:
                self._finished(received.request_id, received.delta.index)
            return
        self._had_output = True
        running.inbox.accept(received)
        if received.finish is not None:
            running.owed_finishes.discard(received.delta.index)
            if not running.owed_finishes and not running.request.is_idempotent:  # another client may want it again
                self._unacknowledged.append(received.request_id)
        if not running.inbox.has_ended:
            return
        if running.owed_finishes:
            # It ended because the delta was refused: the server goes on.
            self.release(running.inbox)
        else:
            del self._running[received.request_id]

    def _finished(self, request_id: str, index: int) -> None:
        """Of a request that was left: its last end is acknowledged."""
        owed = self._owed_finishes.get(request_id)
        if owed is None:
            return
        owed.discard(index)
        if not owed:
            del self._owed_finishes[request_id]
            self._unacknowledged.append(request_id)

    def _fail(self, request_id: str, error: PacelineError) -> None:
        self._owed_finishes.pop(request_id, None)
        running = self._running.pop(request_id, None)
        if running is not None:
            running.inbox.interrupt(error)

    def _stop_taking(self, cause: EndCause, error: PacelineError) -> None:
        if self._end is None:
            self._end = SessionEnd(cause, asyncio.get_running_loop().time(), error, self._had_output)
            self._state = SessionState.DRAINING

    def _end_all(self, make_error: ErrorFactory) -> None:
        self._stop_taking(EndCause.BROKEN if self._was_answered else EndCause.UNANSWERED, make_error())
        self._state = SessionState.ENDED
        for running in self._running.values():
            running.inbox.interrupt(make_error())
        self._running.clear()

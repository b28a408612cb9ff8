"""One HTTP request and its answer, a whole one or a stream of server-sent events, over plain ASGI.

Knows nothing of what is asked and answered. A stream is two kinds of messages to the server, without a task or a
generator for each: chunks are many.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from starlette.types import Receive, Scope, Send

from paceline.process.trace_ids import MAX_TRACE_STATE_BYTES, read_trace_parent
from paceline_gateway.errors import ApiError, refused

_JSON = (b"content-type", b"application/json")
_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_SILENCE_S = 10.0
"""Proxies cut connections that say nothing for 30 to 60 s. Until then an error still has a status of its own."""
_SLOW_S = 0.5
_COMMENT = b": waiting\n\n"
_KEY = re.compile(r"[\x21-\x7e]{1,128}")
_MAX_NAMED = 16  # ignored fields
_MAX_NAME_CHARS = 64

Headers = list[tuple[bytes, bytes]]


class GoneError(Exception):
    """The client is gone: nobody reads an answer."""


class Closable(Protocol):
    """What is left when a client is gone."""

    async def aclose(self) -> None: ...


class Exchange:
    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.path = str(scope["path"])
        self.ignored: tuple[str, ...] = ()
        """Fields of the request that nobody knows: named in a header."""
        self.status: int | None = None
        """Once it was sent."""
        self._headers: dict[bytes, str] = {name: value.decode("latin-1") for name, value in scope["headers"]}
        self._receive = receive
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._turn = asyncio.Lock()
        self._last_sent_s = self._loop.time()

    # The request

    @property
    def bearer(self) -> str | None:
        """Raises ApiError for credentials of another kind."""
        kind, _, token = self._headers.get(b"authorization", "").partition(" ")
        if not kind:
            return None
        if kind.lower() != "bearer" or not token.strip():
            raise ApiError(401, "Authorization: give `Bearer` and a key", code="invalid_api_key")
        return token.strip()

    @property
    def request_id(self) -> str | None:
        """`X-Request-Id`: of what the client does, which may be several calls. Another than 1 to 128 ASCII characters
        without blanks is passed over.
        """
        given = self._headers.get(b"x-request-id", "")
        return given if _KEY.fullmatch(given) else None

    @property
    def key(self) -> str | None:
        """`Idempotency-Key`. Raises ApiError."""
        given = self._headers.get(b"idempotency-key")
        if given is not None and not _KEY.fullmatch(given):
            raise refused("Idempotency-Key", "has to be 1 to 128 ASCII characters without blanks")
        return given

    @property
    def trace(self) -> dict[str, str]:
        """Its W3C headers, if they are right."""
        parent, state = self._headers.get(b"traceparent", ""), self._headers.get(b"tracestate", "")
        if read_trace_parent(parent) is None:
            return {}
        is_sent = state and state.isascii() and len(state) <= MAX_TRACE_STATE_BYTES
        return {"traceparent": parent} | ({"tracestate": state} if is_sent else {})

    async def body(self) -> bytes:
        """Raises GoneError."""
        parts = []
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise GoneError
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                return b"".join(parts)

    async def until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    # The answer

    async def answer(self, content: bytes, status: int = 200, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """As a whole, of JSON."""
        self.status = status
        length = (b"content-length", b"%d" % len(content))
        await self._send(
            {"type": "http.response.start", "status": status, "headers": [_JSON, length, *self._own(), *headers]}
        )
        await self._send({"type": "http.response.body", "body": content})

    async def fail(self, error: ApiError) -> None:
        """With a status while there is none, else as the last event; nothing after it claims success."""
        if self.status is None:
            await self.answer(error.body, error.status, error.headers())
        else:
            await self.end(b"data: " + error.body + b"\n\n")

    async def write(self, events: bytes) -> None:
        """Some events; the first ones with the status. Waits for a reader that is slow."""
        async with self._turn:
            if self.status is None:
                self.status = 200
                await self._send({"type": "http.response.start", "status": 200, "headers": [*_EVENTS, *self._own()]})
            await self._send({"type": "http.response.body", "body": events, "more_body": True})
            self._last_sent_s = self._loop.time()

    async def end(self, events: bytes) -> None:
        await self.write(events)
        await self._send({"type": "http.response.body", "body": b""})

    @contextlib.asynccontextmanager
    async def attended(self, *runs: Closable, is_stream: bool) -> AsyncIterator[None]:
        """Leaves these when the client does, and at the end of the block. Meanwhile no stream is silent for long."""
        attending = asyncio.create_task(self._attend(runs, is_stream=is_stream))
        try:
            yield
        finally:
            attending.cancel()
            for run in runs:
                await run.aclose()

    async def _attend(self, runs: Sequence[Closable], *, is_stream: bool) -> None:
        while True:
            try:
                async with asyncio.timeout_at(self._last_sent_s + _SILENCE_S if is_stream else None):
                    await self.until_gone()
            except TimeoutError:
                if self._turn.locked():  # the reader is slow
                    await asyncio.sleep(_SLOW_S)
                elif self._loop.time() >= self._last_sent_s + _SILENCE_S:
                    await self.write(_COMMENT)
            else:
                for run in runs:
                    await run.aclose()
                return

    def _own(self) -> Headers:
        headers = []
        if self.request_id is not None:
            headers.append((b"x-request-id", self.request_id.encode()))
        if self.ignored:
            named = (re.sub(r"[^\x21-\x7e]|,", "?", name[:_MAX_NAME_CHARS]) for name in self.ignored[:_MAX_NAMED])
            headers.append((b"x-paceline-ignored", ",".join(named).encode()))
        return headers

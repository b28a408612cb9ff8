"""What uvicorn's connections lack: an end of waiting for a request, bounds of its size and of their number, and clients
that shut down their side and still read.
"""

import asyncio
import socket
from asyncio import TimerHandle
from typing import Any

import msgspec
from typing_extensions import override
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

MAX_CONNECTIONS = 8192
"""As gRPC ports have."""
MAX_HEADER_BYTES = 32 * 1024
MAX_BODY_BYTES = 4 * 1024 * 1024
REQUEST_S = 10.0
_UNREAD_S = 60.0  # that a client may leave what was sent
# What a client that still reads passes over, and one that is gone answers by a reset.
_PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
_PROBE_OF_STREAM = b"3\r\n:\n\n\r\n"
_PROBES_S = (0.0, 0.2)  # the reset comes after the first, and is noticed at the second


class HttpConnection(HttpToolsProtocol):
    """Of one client. A request has to be whole `request_s` after its first byte, and its first byte has to come so soon
    after the connection.
    """

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any], request_s: float = REQUEST_S
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._request_s = request_s
        self._deadline: TimerHandle | None = None
        self._is_in_head = True
        self._num_head_bytes = 0
        self._num_body_bytes = 0
        self._is_refused = False

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn does
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
            return
        if (sock := transport.get_extra_info("socket")) is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(_UNREAD_S * 1000))
        self._await_request()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    @override
    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._is_in_head:
            self._num_head_bytes += len(data)
        super().data_received(data)
        if self._is_in_head and self._num_head_bytes > MAX_HEADER_BYTES:
            self._refuse(431, f"the header has more than {MAX_HEADER_BYTES} bytes")

    @override
    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio takes one
        """True keeps the connection: the client has said all, and may still read."""
        is_answering = self.cycle is not None and not (self.cycle.response_complete or self.cycle.more_body)
        if not is_answering or self.scheme == "https":  # TLS has no half of a connection
            return False
        for delay_s in _PROBES_S:
            self.loop.call_later(delay_s, self._probe)
        return True

    def _probe(self) -> None:
        if not (self.cycle.response_complete or self.transport.is_closing()):
            self.transport.write(_PROBE_OF_STREAM if self.cycle.response_started else _PROBE)

    # What the parser finds

    @override
    def on_message_begin(self) -> None:
        if self._is_refused:
            return
        super().on_message_begin()
        self._is_in_head, self._num_body_bytes = True, 0
        if self._deadline is None:
            self._await_request()

    @override
    def on_headers_complete(self) -> None:
        if self._is_refused:
            return
        self._is_in_head, self._num_head_bytes = False, 0
        if self.cycle is not None and not self.cycle.response_complete:
            # Pipelined: nobody does so, and that the client is gone would be told to the latest request alone.
            self._is_refused = True
            self.transport.abort()
            return
        length = next((value for name, value in self.headers if name == b"content-length"), b"0")
        if sum(len(name) + len(value) + 4 for name, value in self.headers) + len(self.url) > MAX_HEADER_BYTES:
            self._refuse(431, f"the header has more than {MAX_HEADER_BYTES} bytes")
        elif int(length) > MAX_BODY_BYTES:
            self._refuse(413, f"the body has {int(length)} bytes; at most {MAX_BODY_BYTES} are taken")
        else:
            super().on_headers_complete()

    @override
    def on_body(self, body: bytes) -> None:
        if self._is_refused:
            return
        self._num_body_bytes += len(body)
        if self._num_body_bytes > MAX_BODY_BYTES:
            self._refuse(413, f"the body has more than {MAX_BODY_BYTES} bytes")
        else:
            super().on_body(body)

    @override
    def on_message_complete(self) -> None:
        self._stop_waiting()
        if self._is_refused:
            self.transport.close()
            return
        self._is_in_head = True
        super().on_message_complete()

    @override
    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)
        self.transport.close()

    # What is refused

    def _await_request(self) -> None:
        self._deadline = self.loop.call_later(self._request_s, self._expire)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        if self._is_refused or self.scope is None:
            self.transport.abort()
            return
        self._refuse(408, f"the request was not whole after {self._request_s:g} s")
        self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """Whoever still sends would not read the answer behind a reset: what comes is passed over until the end."""
        if self._is_refused:
            return
        self._is_refused = True
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        content = msgspec.json.encode({"error": error})
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(content)
        if self.cycle is not None and not self.cycle.response_complete:
            if self.cycle.response_started:
                self.transport.abort()
                return
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self._deadline is None:
            self._await_request()
        self.transport.write(STATUS_LINE[status] + head + content)

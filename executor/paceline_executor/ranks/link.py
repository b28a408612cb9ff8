"""A connection between node 0 and another one: messages of a kind and a length, plain or by TLS with both certificates.

A peer that is silent because its machine or the network has gone is noticed by TCP itself, also where nothing is said.
Refuses to know what messages say.
"""

import enum
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

from paceline.process.callers import Role, caller_of_uris
from paceline.process.tls_folder import TlsFolder
from paceline_executor.errors import RankError

_HEAD = struct.Struct("<II")  # kind, bytes that follow
_MAX_BYTES = 1 << 16
_MAX_BATCH_BYTES = 1 << 28
_PART_BYTES = 1 << 20
_AWAY_S = 5


class LinkMessage(enum.IntEnum):
    """Of a message. All but batches and posts are JSON objects or nothing."""

    HELLO = 1  # to node 0, and its answer
    ORDER = 2  # from node 0, as all that follow in this line: start your ranks
    LIMITS = 3
    WARM = 4
    BATCH = 5  # see `ranks.messages`
    BEAT = 6  # to node 0, as all that follow
    ANSWER = 7
    POSTS = 8  # int64 [1 + ranks of the node]: a step, and the hash of what each drew in it
    LEAVING = 9  # in place of a beat: this node was told to stop


_KINDS = frozenset(LinkMessage)


class Link:
    """Sends from any thread, receives in one."""

    def __init__(self, connection: socket.socket, *, to_node_0: bool) -> None:
        """to_node_0: of another node's end, which alone takes batches."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _AWAY_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _AWAY_S)
        connection.setblocking(False)
        self._connection = connection
        self._max_bytes = _MAX_BATCH_BYTES if to_node_0 else _MAX_BYTES
        self._received = bytearray()
        self._is_closed = False
        self._sending = threading.Lock()  # a message at a time
        self._using = threading.Lock()  # of TLS, which reads and writes by turns

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        self._connection.close()

    def send(self, kind: LinkMessage, body: bytes | bytearray = b"") -> None:
        """Waits where the peer does not read. Raises OSError where it is gone."""
        data = memoryview(_HEAD.pack(kind, len(body)) + body)
        with self._sending:
            while data:
                try:
                    with self._using:
                        data = data[self._connection.send(data) :]
                except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                    _wait(self._connection, select.POLLOUT)

    def receive(self) -> Iterator[tuple[LinkMessage, bytearray]]:
        """What has come. Raises ConnectionError behind the last message, RankError for what is none."""
        is_more = True
        while is_more:
            yield from self._take_whole()
            is_more = self._read()
        if self._is_closed:
            raise ConnectionError("the connection was closed")

    def receive_one(self, kind: LinkMessage, patience_s: float) -> bytearray:
        """Raises OSError where it does not come in time, RankError where another one does."""
        end_s = time.monotonic() + patience_s
        while (left_s := end_s - time.monotonic()) > 0:
            for found, body in self.receive():
                if found is not kind:
                    raise RankError("another message came than was due: give all nodes one version")
                return body
            _wait(self._connection, select.POLLIN, left_s)
        raise TimeoutError("nothing came")

    def is_open(self) -> bool:
        return not _wait(self._connection, select.POLLRDHUP, 0)

    def _take_whole(self) -> Iterator[tuple[LinkMessage, bytearray]]:
        while len(self._received) >= _HEAD.size:
            code, length = _HEAD.unpack_from(self._received)
            if code not in _KINDS or length > self._max_bytes:
                raise RankError("what came is no message between nodes: give all nodes one version")
            end = _HEAD.size + length
            if len(self._received) < end:
                break
            body = self._received[_HEAD.size : end]
            del self._received[:end]
            yield LinkMessage(code), body

    def _read(self) -> bool:
        """A part. Returns whether more may lie there."""
        try:
            with self._using:
                part = self._connection.recv(_PART_BYTES)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        except OSError:
            part = b""
        self._received += part
        self._is_closed = not part
        return not self._is_closed


def link_over(connection: socket.socket, tls: TlsFolder | None, *, is_server: bool) -> Link:
    """Raises OSError where the peer has no certificate of this authority, RankError where it is no executor's."""
    if tls is None:
        return Link(connection, to_node_0=not is_server)
    context = tls.certificates().context(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    wrapped = context.wrap_socket(connection, server_side=is_server)  # closes what fails
    names: Any = (wrapped.getpeercert() or {}).get("subjectAltName", ())
    if Role.EXECUTOR not in caller_of_uris([text for kind, text in names if kind == "URI"]).roles:
        wrapped.close()
        raise RankError("by its certificate the peer is no executor")
    return Link(wrapped, to_node_0=not is_server)


def _wait(connection: socket.socket, event: int, timeout_s: float | None = None) -> bool:
    poll = select.poll()
    poll.register(connection, event)
    return bool(poll.poll(None if timeout_s is None else 1000 * timeout_s))

"""A TCP proxy that can make a link slow, narrow, silent or broken: between a client and a server on this machine.

Knows bytes and connections. Refuses to know what they carry. What it holds back while a link is silent is delivered
when the link is whole again, as a network does with what was sent again and again meanwhile.
"""

import asyncio
import contextlib
import random
import socket
import struct
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Self

_CHUNK_BYTES = 64 * 1024
# A connection that takes nothing is asked for no more than this beyond what the kernel holds.
_MAX_WAITING_CHUNKS = 64
_SLICES_PER_SECOND = 20
# Closing with a linger of zero seconds sends RST, as a host does that does not know the connection any more.
_RESET = struct.pack("ii", 1, 0)


class Direction(Enum):
    TO_SERVER = "to the server"
    TO_CLIENT = "to the client"


@dataclass(frozen=True, slots=True)
class LinkState:
    """How a link treats what passes. The default passes everything at once."""

    delay_seconds: float = 0.0
    jitter_seconds: float = 0.0
    """Up to this much is added to each delay; the order stays."""
    bytes_per_second: int | None = None
    """Each direction of each connection; None: no limit."""
    silent: frozenset[Direction] = frozenset()
    """Directions in which nothing passes, while the connection stays open: a half-open link, or both: a dead one."""
    refuses: bool = False
    """New connections are reset."""


WHOLE = LinkState()


class FaultProxy:
    """Listens on a free port of loopback inside an `async with` block and passes on to `host:port`."""

    def __init__(self, host: str, port: int, chance: random.Random) -> None:
        self._address = (host, port)
        self._chance = chance
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self.state = WHOLE
        self.changed = asyncio.Event()

    @property
    def address(self) -> str:
        """Where to connect instead."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    def become(self, state: LinkState) -> None:
        """From now on treat everything so, open connections too."""
        self.state = state
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    def cut(self) -> None:
        """Reset every open connection, on both sides."""
        for connection in tuple(self._connections):
            connection.reset()

    def delay(self) -> float:
        """For the next piece."""
        return self.state.delay_seconds + self._chance.random() * self.state.jitter_seconds

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        running = [connection.task for connection in self._connections]
        self.cut()
        await asyncio.gather(*running, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connection = _Connection(self, task, [writer])
        self._connections.add(connection)
        try:
            if not self.state.refuses:
                await connection.run(reader, writer, self._address)
        except (OSError, asyncio.CancelledError):
            # No server, or `cut`.
            pass
        finally:
            connection.reset()
            self._connections.discard(connection)


@dataclass(eq=False, slots=True)
class _Connection:
    """One connection: a pump for each direction."""

    proxy: FaultProxy
    task: asyncio.Task[None]
    writers: list[asyncio.StreamWriter]

    async def run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: tuple[str, int]) -> None:
        """Return when both sides have closed or one of them broke off. OSError when there is no server."""
        far_reader, far_writer = await asyncio.open_connection(*address)
        self.writers.append(far_writer)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_Pump(self.proxy, Direction.TO_SERVER, reader, far_writer).run())
                group.create_task(_Pump(self.proxy, Direction.TO_CLIENT, far_reader, writer).run())
        except* OSError:
            # Whoever broke it, the other side hears of it the same way: by a reset.
            pass

    def reset(self) -> None:
        for writer in self.writers:
            with contextlib.suppress(OSError):
                peer: socket.socket | None = writer.get_extra_info("socket")
                if peer is not None:
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()
        self.writers.clear()
        if self.task is not asyncio.current_task():
            self.task.cancel()


class _Pump:
    """One direction of a connection. Reads ahead, so that a delay is a delay and not a limit."""

    def __init__(
        self, proxy: FaultProxy, direction: Direction, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._proxy = proxy
        self._direction = direction
        self._reader = reader
        self._writer = writer
        self._waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_MAX_WAITING_CHUNKS)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read())
            group.create_task(self._write())

    async def _read(self) -> None:
        now = asyncio.get_running_loop().time
        due = 0.0
        while True:
            rate = self._proxy.state.bytes_per_second
            data = await self._reader.read(_CHUNK_BYTES if rate is None else max(rate // _SLICES_PER_SECOND, 1))
            due = max(due, now() + self._proxy.delay())
            await self._waiting.put((due, data))
            if not data:
                return
            if rate is not None:
                await asyncio.sleep(len(data) / rate)

    async def _write(self) -> None:
        now = asyncio.get_running_loop().time
        while True:
            due, data = await self._waiting.get()
            # A pause of zero would still cost a turn of the loop per piece.
            if (pause := due - now()) > 0:
                await asyncio.sleep(pause)
            while self._direction in self._proxy.state.silent:
                await self._proxy.changed.wait()
            if not data:
                self._writer.write_eof()
                return
            self._writer.write(data)
            await self._writer.drain()

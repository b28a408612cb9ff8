"""A gateway in this process, on sockets of loopback, and raw clients that see every byte."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx2

from paceline_gateway.config import parse_config
from paceline_gateway.process import Gateway

ASKING = {"messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


class ServedGateway:
    """Where it listens, and an HTTP client of it."""

    def __init__(self, gateway: Gateway, http: httpx2.AsyncClient) -> None:
        self.gateway = gateway
        self.http = http
        self._writers: list[asyncio.StreamWriter] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gateway.port}"

    async def post(self, path: str, body: object, headers: Mapping[str, str] | None = None) -> httpx2.Response:
        return await self.http.post(path, json=body, headers=dict(headers or {}))

    async def connect(self, receive_bytes: int | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Closed at the end. `receive_bytes` is the size of the socket's buffer, and of what is read ahead."""
        sock = socket.socket()
        sock.setblocking(False)
        if receive_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.gateway.port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=receive_bytes or 1 << 20)
        self._writers.append(writer)
        return reader, writer

    async def hang_up(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def ask(
        self, body: Mapping[str, Any], path: str = CHAT, receive_bytes: int | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection on which this was asked."""
        reader, writer = await self.connect(receive_bytes)
        content = json.dumps(body).encode()
        writer.write(f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content)
        return reader, writer


@asynccontextmanager
async def serve_gateway(target: str, *options: str, request_s: float = 10.0) -> AsyncIterator[ServedGateway]:
    """A scheduler's. `request_s`: how long a request may take to be whole."""
    config = parse_config(["--target", target, "--port", "0", "--metrics-port", "0", *options])
    served: ServedGateway | None = None
    try:
        async with Gateway(config, request_s=request_s) as gateway, httpx2.AsyncClient(timeout=30) as http:
            http.base_url = httpx2.URL(f"http://127.0.0.1:{gateway.port}")
            served = ServedGateway(gateway, http)
            yield served
    finally:
        if served is not None:
            await served.hang_up()


def events_of(content: str) -> list[str]:
    """The data of each event; every byte of the stream belongs to one, or to a comment."""
    *blocks, rest = content.split("\n\n")
    assert rest == "", f"an event has no end: {rest!r}"
    data = [block for block in blocks if not block.startswith(":")]
    assert all(block.startswith("data: ") and "\n" not in block for block in data), data
    return [block.removeprefix("data: ") for block in data]

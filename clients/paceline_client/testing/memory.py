"""The fake server without sockets, in the caller's own event loop: for tests in virtual time, of many interruptions.

server = MemoryServer(FakeServicer(say("hello")))
dial = lambda address: server.dial()
connection = Connection(Addresses("memory"), dial=dial, retry=Retry(), keepalive=Keepalive(), limits=Limits())
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable

import grpc
import grpc.aio

from paceline.v1 import inference_pb2 as pb
from paceline_client.testing.script import Break
from paceline_client.testing.servicer import BrokenOffError, FakeServicer

Serve = Callable[[AsyncIterator[pb.SessionRequest]], AsyncGenerator[pb.SessionResponse, None]]


class MemoryServer:
    """A servicer that can be reached while it is up. Going down it keeps its requests: they play on."""

    def __init__(self, servicer: FakeServicer) -> None:
        self.servicer = servicer
        self.is_up = True
        self.is_silent = False  # nothing answers there, not even with a refusal
        self.connect_seconds = 0.0
        self.num_dialled = 0
        self.channels: list[MemoryChannel] = []
        self._calls: list[MemoryCall] = []

    def dial(self) -> "MemoryChannel":
        self.num_dialled += 1
        self.channels.append(MemoryChannel(self))
        return self.channels[-1]

    def open_call(self) -> "MemoryCall":
        call = MemoryCall(self.servicer.serve)
        if not self.is_up:
            call.break_off(Break())
        self._calls.append(call)
        return call

    def go_down(self) -> None:
        self.is_up = False
        calls, self._calls = self._calls, []
        for call in calls:
            call.break_off(Break())

    def come_up(self) -> None:
        self.is_up = True


class MemoryChannel:
    def __init__(self, server: MemoryServer) -> None:
        self._server = server
        self.is_closed = False

    @property
    def is_ready(self) -> bool:
        return self._server.is_up and not self._server.is_silent and not self.is_closed

    async def becomes_ready(self, seconds: float) -> bool:
        takes = math.inf if self._server.is_silent else self._server.connect_seconds if self._server.is_up else 0.0
        await asyncio.sleep(max(min(takes, seconds), 0.0))
        return self.is_ready and takes < seconds

    @property
    def why_not_ready(self) -> str:
        return "" if self._server.is_up or self._server.is_silent else "connection refused"

    async def what_serves(self) -> str:
        return ""

    def token_watch(self) -> Callable[[], bool]:
        return lambda: False

    def open_session(self) -> "MemoryCall":
        return self._server.open_call()

    async def close(self) -> None:
        self.is_closed = True


class MemoryCall:
    def __init__(self, serve: Serve) -> None:
        self._incoming: asyncio.Queue[pb.SessionRequest | None] = asyncio.Queue()
        self._outgoing: asyncio.Queue[pb.SessionResponse | grpc.aio.AioRpcError | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._run(serve))

    async def read(self) -> pb.SessionResponse | None:
        item = await self._outgoing.get()
        if isinstance(item, pb.SessionResponse):
            return item
        self._outgoing.put_nowait(item)  # the end stays
        if item is not None:
            raise item
        return None

    async def write(self, request: pb.SessionRequest, /) -> None:
        self._incoming.put_nowait(request)

    async def done_writing(self) -> None:
        self._incoming.put_nowait(None)

    def cancel(self) -> bool:
        return self._task.cancel()

    def break_off(self, step: Break) -> None:
        """What was said before is still read."""
        self._task.cancel()
        self._outgoing.put_nowait(_status(step))

    async def _run(self, serve: Serve) -> None:
        try:
            async with contextlib.aclosing(serve(self._messages())) as responses:
                async for response in responses:
                    self._outgoing.put_nowait(response)
            self._outgoing.put_nowait(None)
        except BrokenOffError as error:
            self._outgoing.put_nowait(_status(error.step))

    async def _messages(self) -> AsyncIterator[pb.SessionRequest]:
        while (message := await self._incoming.get()) is not None:
            yield message


def _status(step: Break) -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(step.code, nothing, nothing, details=step.message)

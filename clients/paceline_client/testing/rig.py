"""A fake server, or several, and one client, without sockets and in one event loop: for scenarios in virtual time."""

import asyncio
from collections.abc import Callable, Sequence

from paceline_client.addresses import Addresses
from paceline_client.async_client import AsyncStream
from paceline_client.config import Keepalive, Limits, Retry, Timeout
from paceline_client.connection import Connection
from paceline_client.request_run import RequestRun
from paceline_client.requests import GenerationRequest, Output, Sampling, Scheduling, Stopping, Text
from paceline_client.testing.memory import MemoryChannel, MemoryServer
from paceline_client.testing.script import Script
from paceline_client.testing.servicer import FakeServicer, Seen

_POLL_SECONDS = 0.05
# Pauses as they are meant, without their jitter.
STEADY = Retry(draw=lambda: 0.5)


class MemoryRig:
    """Make it on the loop it is used on. The servicer can be told what to refuse, the server to go down."""

    def __init__(
        self,
        script: Script,
        *,
        retry: Retry = STEADY,
        limits: Limits | None = None,
        heartbeat_seconds: float | None = 0.5,
        break_after: Sequence[int] = (),
        names: Sequence[str] = ("memory",),
        others: Sequence[str] = (),
    ) -> None:
        """`names` are the addresses of servers that all play the script; `servicer` and `server` are the first one.

        So do those at `others`, which the client's target does not have. Elsewhere connections are refused.
        """
        everybody = [*names, *others]
        servicers = [
            FakeServicer(script, heartbeat_seconds=heartbeat_seconds, break_after=break_after) for _ in everybody
        ]
        self.servers = {name: MemoryServer(servicer) for name, servicer in zip(everybody, servicers, strict=True)}
        self._nowhere = MemoryServer(servicers[0])
        self._nowhere.go_down()
        self.servicer, self.server = servicers[0], self.servers[names[0]]
        self.connection: Connection[MemoryChannel] = Connection(
            Addresses(list(names)),
            dial=lambda address: self.servers.get(address, self._nowhere).dial(),
            retry=retry,
            keepalive=Keepalive(),
            limits=limits or Limits(),
        )
        self._retry = retry

    @property
    def seen(self) -> Seen:
        return self.servicer.seen

    def stream(
        self, request_id: str = "r", *, n: int | None = None, total_seconds: float | None = None, text: str = "?"
    ) -> AsyncStream:
        request = GenerationRequest(
            prompt=Text(text),
            request_id=request_id,
            tenant="blue",
            model="",
            sampling=Sampling(n=n),
            stopping=Stopping(),
            output=Output(),
            scheduling=Scheduling(),
            timeout=Timeout(total_seconds=total_seconds),
        )
        return AsyncStream(RequestRun(self.connection, request, self._retry), request)

    async def until(self, condition: Callable[[Seen], object]) -> None:
        while not condition(self.seen):  # noqa: ASYNC110  what clients send sets no event
            await asyncio.sleep(_POLL_SECONDS)

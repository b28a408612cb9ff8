"""One connection to a server: what is asked of it, and the one over gRPC.

`Channel` is the seam under the sessions: whatever keeps its promises, on whatever event loop, can carry them.
"""

import asyncio
import re
from typing import Protocol

import grpc
import grpc.aio

from paceline_client import wire
from paceline_client.config import Tls

# What gRPC writes before the reason: a status and the address, which is in the message already.
_GRPC_PREFIXES = re.compile(r"^(?:[A-Z_]+: )?(?:ipv[46]:\S+: )?")


class Channel(Protocol):
    """A connection that is made once: one that could not be made, or broke, is closed and another one is dialled."""

    @property
    def is_ready(self) -> bool:
        """Whether it is connected now."""

    async def becomes_ready(self, seconds: float) -> bool:
        """Whether it connects: False as soon as an attempt of its failed, after this long, or when it is closed."""

    async def why_not_ready(self) -> str:
        """The reason why it does not connect, for people."""

    def open_session(self) -> wire.SessionCall:
        """Start a session; nothing is known of the server until its first message."""

    async def close(self) -> None:
        """End it and the calls on it."""


class GrpcChannel:
    """A `Channel` over gRPC, for sessions and for short calls.

    `server_name` is what the server presents itself as where the target does not say.
    """

    def __init__(self, target: str, tls: Tls | None, *, server_name: str | None = None) -> None:
        self._channel = wire.open_channel(target, tls, server_name)

    @property
    def grpc(self) -> grpc.aio.Channel:
        """What short calls are made on."""
        return self._channel

    @property
    def is_ready(self) -> bool:
        """Whether it is connected now."""
        return self._channel.get_state() is grpc.ChannelConnectivity.READY

    async def becomes_ready(self, seconds: float) -> bool:
        """Whether it connects: False as soon as an attempt of its failed, after this long, or when it is closed."""
        try:
            async with asyncio.timeout(seconds):
                while True:
                    state = self._channel.get_state(try_to_connect=True)
                    if state is grpc.ChannelConnectivity.READY:
                        return True
                    if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
                        return False
                    await self._channel.wait_for_state_change(state)
        except (TimeoutError, grpc.aio.UsageError):
            # The second: it was closed meanwhile, together with the client.
            return False

    async def why_not_ready(self) -> str:
        """The reason why it does not connect, which only a call on it tells."""
        try:
            await wire.list_models(self._channel, timeout_seconds=0.5)
        except grpc.aio.AioRpcError as error:
            details = error.details() or error.code().name
            return _GRPC_PREFIXES.sub("", details.rpartition("last error: ")[2])
        return "the connection came up too late"

    def open_session(self) -> wire.SessionCall:
        """Start the Session call."""
        return wire.open_session(self._channel)

    async def close(self) -> None:
        """End it and the calls on it."""
        await self._channel.close()

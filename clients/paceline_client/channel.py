"""One connection to a server: what is asked of it, and the one over gRPC.

`Channel` is the seam under the sessions: whatever keeps its promises, on whatever event loop, can carry them.
"""

import asyncio
import re
from collections.abc import Callable
from typing import Protocol

import grpc
import grpc.aio

from paceline_client import wire
from paceline_client.credentials import Credentials

_WHY_SECONDS = 0.5
# What gRPC writes before the reason: a status and the address, which is in the message already.
_GRPC_PREFIXES = re.compile(r"^(?:[A-Z_]+: )?(?:ipv[46]:\S+: )?")


class Channel(Protocol):
    """A connection that is made once: one that could not be made, or broke, is closed and another one is dialled."""

    @property
    def is_ready(self) -> bool:
        """Whether it is connected now."""

    async def becomes_ready(self, seconds: float) -> bool:
        """Whether it connects: False as soon as an attempt of its failed, after this long, or when it is closed."""

    @property
    def why_not_ready(self) -> str:
        """What became of an attempt that failed, for people; empty while nothing has answered."""

    async def what_serves(self) -> str:
        """What answers there, as the end of a sentence, where it is not the API of a scheduler; empty if it may be."""

    def token_watch(self) -> Callable[[], bool]:
        """Says later whether the token that calls show now has been replaced since."""

    def open_session(self) -> wire.SessionCall:
        """Start a session; nothing is known of the server until its first message."""

    async def close(self) -> None:
        """End it and the calls on it."""


class GrpcChannel:
    """`server_name` is what the server presents itself as where the target does not say, `window_bytes` how much of a
    stream may be under way.
    """

    def __init__(
        self,
        target: str,
        credentials: Credentials,
        *,
        server_name: str | None = None,
        window_bytes: int | None = None,
    ) -> None:
        self._calls = wire.open_channel(target, credentials, server_name, window_bytes)
        self._channel = self._calls.channel
        self._why_not_ready = ""

    @property
    def calls(self) -> wire.CallChannel:
        return self._calls

    @property
    def is_ready(self) -> bool:
        return self._channel.get_state() is grpc.ChannelConnectivity.READY

    async def becomes_ready(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                while True:
                    state = self._channel.get_state(try_to_connect=True)
                    if state is grpc.ChannelConnectivity.READY:
                        return True
                    if state is grpc.ChannelConnectivity.SHUTDOWN:
                        return False
                    if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                        self._why_not_ready = await self._ask_why()
                        return self.is_ready
                    await self._channel.wait_for_state_change(state)
        except (TimeoutError, grpc.aio.UsageError):
            # It was closed meanwhile, with the client.
            return False

    @property
    def why_not_ready(self) -> str:
        return self._why_not_ready

    async def _ask_why(self) -> str:
        # Only a call tells. After an attempt has failed it does so at once, without a new one.
        try:
            await wire.list_models(self._calls, timeout_seconds=_WHY_SECONDS)
        except grpc.aio.AioRpcError as error:
            details = error.details() or error.code().name
            return _GRPC_PREFIXES.sub("", details.rpartition("last error: ")[2])
        return ""

    async def what_serves(self) -> str:
        return await wire.what_serves(self._calls, timeout_seconds=_WHY_SECONDS)

    def token_watch(self) -> Callable[[], bool]:
        return self._calls.credentials.token_watch()

    def open_session(self) -> wire.SessionCall:
        return wire.open_session(self._calls)

    async def close(self) -> None:
        await self._channel.close()

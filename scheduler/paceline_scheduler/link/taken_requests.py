"""The requests that the edge waits for, by handle: whether there are any, and whether another scheduler could go on.

Refuses to know what becomes of them.
"""

import asyncio
from collections.abc import Sequence

from paceline_scheduler.core.request import Request


class TakenRequests:
    """Those that were taken and have neither ended nor lost their listener."""

    def __init__(self) -> None:
        self._is_resumable: dict[int, bool] = {}
        self._none_left = asyncio.Event()

    @property
    def handles(self) -> tuple[int, ...]:
        """All of them, in order."""
        return tuple(sorted(self._is_resumable))

    @property
    def are_resumable(self) -> bool:
        """Whether the clients of all can go on elsewhere."""
        return all(self._is_resumable.values())

    def take(self, requests: Sequence[Request]) -> None:
        """The edge waits for these from now on."""
        self._is_resumable.update((request.handle, request.is_resumable) for request in requests)

    def forget(self, handle: int) -> None:
        """The edge does not wait for one any more, if it did."""
        self._is_resumable.pop(handle, None)
        if not self._is_resumable:
            self._none_left.set()

    async def until_none(self) -> None:
        """Wait until none is left."""
        while self._is_resumable:
            self._none_left.clear()
            await self._none_left.wait()

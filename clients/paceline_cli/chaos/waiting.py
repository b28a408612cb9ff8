"""Waiting for what happens elsewhere: in other processes, or in many streams at once.

Apart, because campaigns, systems and tests wait alike.
"""

import asyncio
from collections.abc import Callable

_POLL_SECONDS = 0.02


async def until(holds: Callable[[], bool]) -> None:
    """Return when it holds. It is looked at every few milliseconds, so it should be quick."""
    while not holds():  # noqa: ASYNC110  no event comes from there
        await asyncio.sleep(_POLL_SECONDS)

"""Tasks that live and die together, and calls that come when it is time."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn


async def run_until_one_ends(*coroutines: Coroutine[Any, Any, NoReturn]) -> NoReturn:
    """Run endless coroutines until one raises; end the others, then raise what it raised.

    If several have raised at the same moment the first one given counts.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        ended = [task for task in tasks if task.done()]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    ended[0].result()
    raise AssertionError("an endless task returned")


class Alarm:
    """Calls `ring` at the time it was set to last, by a clock that gives seconds. It is told that time.

    Timers may fire a moment early; what is due at that time is due.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float], ring: Callable[[float], None]
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None

    def set(self, at_s: float | None) -> None:
        """Move it to a time; None: it does not ring."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if at_s is not None:
            self._timer = self._loop.call_later(max(0.0, at_s - self._clock()), self._ring, at_s)

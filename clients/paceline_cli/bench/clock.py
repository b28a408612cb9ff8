"""The time as a benchmark sees it: a monotonic reading and a pause. Tests pass their own.

Apart, because all that waits in a benchmark is given one.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clock:
    """Both count in seconds; only differences of `now` mean anything."""

    now: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

"""What ends a process that serves: a signal, or a part of it that fails. Apart from `command`, which has no asyncio."""

import asyncio
import signal
from collections.abc import Callable
from typing import Any


def follow_signals(again: Callable[[int], None]) -> asyncio.Event:
    """Return an event that the first SIGTERM or SIGINT sets; `again` is called with the number of each later one."""
    stopping = asyncio.Event()

    def on_signal(number: int) -> None:
        if stopping.is_set():
            again(number)
        stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stopping


async def until_set_or_ended(event: asyncio.Event, *parts: "asyncio.Future[Any]") -> None:
    """Wait until the event is set, or one of these parts has ended; raise what it failed with."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait((*parts, waiting), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    for part in parts:
        if part.done():
            part.result()

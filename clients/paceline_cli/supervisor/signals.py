"""SIGINT, SIGTERM and SIGHUP for a process that has children to end first."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """The first signal cancels the task that asked, the second calls `on_second`, which must not wait."""

    def __init__(self) -> None:
        self._received: signal.Signals | None = None
        self._is_hurried = False

    @property
    def received(self) -> signal.Signals | None:
        return self._received

    @property
    def is_hurried(self) -> bool:
        return self._is_hurried

    @contextmanager
    def cancelling_this_task(self, on_second: Callable[[], None]) -> Iterator[None]:
        """Inside the block signals do not interrupt, they are handled as the class says."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def handle(number: signal.Signals) -> None:
            if self._received is not None:
                self._is_hurried = True
                on_second()
            elif task is not None:
                self._received = number
                task.cancel()

        for number in _SIGNALS:
            loop.add_signal_handler(number, handle, number)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

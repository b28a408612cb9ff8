"""Executors of several ranks as processes: which ones are an executor's, and whether all of them end with it.

Linux only. Holds processes by descriptors, so that none is meant which has the same id later.
"""

import asyncio
import contextlib
import os
import select
import signal
import time
from pathlib import Path

from paceline_cli.chaos.waiting import until

END_SECONDS = 3.0
"""So long after rank 0 has ended nothing of its group may be left."""


class RankWatch:
    """Watched until `close`. Raises ProcessLookupError where a process has just ended."""

    def __init__(self, process_id: int) -> None:
        """Of rank 0, the executor itself."""
        self._files = [os.pidfd_open(number) for number in (process_id, *followers_of(process_id))]
        self._watch = asyncio.create_task(self._run())
        self.ended_s: float | None = None
        """When rank 0 had ended, on the monotonic clock."""

    async def close(self) -> int:
        """How many processes have outlived rank 0 by too much; they are killed. 0 while it runs."""
        if self.ended_s is None:
            self._watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._watch
        left = [] if self.ended_s is None else [file for file in self._files if not _has_ended(file)]
        for file in left:
            signal.pidfd_send_signal(file, signal.SIGKILL)
        for file in self._files:
            os.close(file)
        return len(left)

    async def _run(self) -> None:
        await until(lambda: _has_ended(self._files[0]))
        self.ended_s = time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await until(lambda: all(map(_has_ended, self._files)))


def followers_of(process_id: int) -> list[int]:
    """The children of an executor; none where it has ended."""
    with contextlib.suppress(OSError):
        threads = [*Path(f"/proc/{process_id}/task").iterdir()]
        return [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    return []


def _has_ended(file: int) -> bool:
    return bool(select.select([file], [], [], 0)[0])

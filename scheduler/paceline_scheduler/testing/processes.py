"""A scheduler as a process of its own, and the events it logs."""

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from typing import Any

Event = dict[str, Any]


class SchedulerTestProcess:
    """`python -m paceline_scheduler` on free ports of 127.0.0.1. Use `start`, and `stop` in the end."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.events: list[Event] = []
        self._reader = asyncio.create_task(self._read())
        self._news = asyncio.Event()

    @staticmethod
    async def start(*arguments: str) -> "SchedulerTestProcess":
        """Start it; arguments given here come after those for the ports."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "paceline_scheduler", "--port", "0", "--admin-port", "0", "--health-port", "0"),
            *arguments,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        return SchedulerTestProcess(process)

    async def event(self, name: str, matches: Callable[[Event], bool] = lambda _: True) -> Event:
        """Wait for an event of this name; AssertionError when the process ends without it."""
        while True:
            for event in self.events:
                if event["event"] == name and matches(event):
                    return event
            assert not self._reader.done(), f"ended without {name!r}: {self.events}"
            self._news.clear()
            await self._news.wait()

    def names(self) -> list[str]:
        """Return the names of the events so far, in order."""
        return [str(event["event"]) for event in self.events]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    async def ended(self) -> tuple[int, str]:
        """Wait for the end; returns the exit code and what was written to stderr."""
        assert self._process.stderr is not None, "it was asked for"
        complaint = await self._process.stderr.read()
        await self._reader
        return await self._process.wait(), complaint.decode()

    async def stop(self) -> None:
        """Kill it if it still runs."""
        if self._process.returncode is None:
            self._process.kill()
        await self.ended()

    async def _read(self) -> None:
        assert self._process.stdout is not None, "it was asked for"
        async for line in self._process.stdout:
            self.events.append(json.loads(line))
            self._news.set()
        self._news.set()

"""A scheduler as a process of its own, and the events it logs."""

import asyncio
import fcntl
import json
import os
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Event = dict[str, Any]
_PIPE_BYTES = 4096  # the smallest there is


class SchedulerTestProcess:
    """`python -m paceline_scheduler` on free ports of 127.0.0.1. Use `start`, and `stop` in the end."""

    def __init__(
        self, process: asyncio.subprocess.Process, log: asyncio.StreamReader, pipe: asyncio.ReadTransport
    ) -> None:
        self._process = process
        self._log = log
        self._pipe = pipe
        self.events: list[Event] = []
        self._reader = asyncio.create_task(self._read())
        self._news = asyncio.Event()

    @staticmethod
    async def start(*arguments: str) -> "SchedulerTestProcess":
        """`arguments` come after those for the ports."""
        log, stdout = os.pipe()
        fcntl.fcntl(log, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "paceline_scheduler", "--port", "0", "--admin-port", "0", "--health-port", "0"),
                *("--metrics-port", "0"),
                *("--cache-dir", os.devnull),  # nothing can be kept: every test finds the same
                *arguments,
                stdout=stdout,
                stderr=asyncio.subprocess.PIPE,
            )
        finally:
            os.close(stdout)
        reader = asyncio.StreamReader()
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(log, "rb", buffering=0)
        )
        return SchedulerTestProcess(process, reader, pipe)

    @property
    def process_id(self) -> int:
        return self._process.pid

    async def event(self, name: str, matches: Callable[[Event], bool] = lambda _: True) -> Event:
        """Raises AssertionError when the process ends without it."""
        while True:
            for event in self.events:
                if event["event"] == name and matches(event):
                    return event
            assert not self._reader.done(), f"ended without {name!r}: {self.events}"
            self._news.clear()
            await self._news.wait()

    def names(self) -> list[str]:
        return [str(event["event"]) for event in self.events]

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def clog_log(self) -> None:
        """Its next write waits."""
        self._pipe.pause_reading()
        # Opened anew: a second writing end must not keep the log from ending with the process.
        file = self._pipe.get_extra_info("pipe").fileno()
        with Path(f"/proc/self/fd/{file}").open("wb", buffering=0) as pipe:
            while select.select((), (pipe,), (), 0)[1]:
                pipe.write(b"\n" * _PIPE_BYTES)

    def unclog_log(self) -> None:
        self._pipe.resume_reading()

    def close_log(self) -> None:
        """Its next write fails."""
        self._pipe.close()

    async def ended(self) -> tuple[int, str]:
        assert self._process.stderr is not None, "it was asked for"
        complaint = await self._process.stderr.read()
        await self._reader
        return await self._process.wait(), complaint.decode()

    async def stop(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        self.unclog_log()  # a test that failed meanwhile has not, and the log would never end
        await self.ended()

    async def _read(self) -> None:
        async for line in self._log:
            if line.strip() and line.endswith(b"\n"):  # else it was killed in the middle of a line
                self.events.append(json.loads(line))
                self._news.set()
        self._news.set()

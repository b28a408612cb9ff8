"""Simulated executors and a scheduler as processes, and what they say of how far a comeback is."""

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime

from paceline_cli.supervisor.programs import LOOPBACK, free_ports
from paceline_scheduler.testing.measured_processes import NO_BUDGETS, cpu_ns, room_for

_GIVE_UP_S = 30.0
_STEP_MS = 25


@dataclass(frozen=True, slots=True)
class Comeback:
    """What followed a kill: seconds until each part of the comeback, and the pause of each stream."""

    parts: dict[str, float]
    gaps_s: list[float]


class _Process:
    """A module that runs, and the lines it prints as they come."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.lines: list[str] = []
        self._printed = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, module: str, *options: str) -> "_Process":
        command = (sys.executable, "-m", module, *options)
        compiled = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}  # as an installed program is
        return cls(await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=compiled))

    async def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        await self._process.wait()
        await self._reading

    @property
    def cpu_s(self) -> float:
        """The CPU time it has taken so far, of all its threads, in seconds."""
        return cpu_ns(self._process) / 1e9

    async def line(self, *words: str) -> str:
        """Return the first line that has all these words, waiting for it."""
        async with asyncio.timeout(_GIVE_UP_S):
            while True:
                self._printed.clear()
                for line in self.lines:
                    if all(word in line for word in words):
                        return line
                await self._printed.wait()

    async def _read(self) -> None:
        assert self._process.stdout is not None, "it was asked for"
        async for line in self._process.stdout:
            self.lines.append(line.decode())
            self._printed.set()


@dataclass(slots=True)
class System:
    """Executors that stay, and one scheduler after another."""

    executors: list[_Process]
    addresses: list[str]
    options: tuple[str, ...]
    target: str
    _scheduler: _Process | None = field(default=None)

    @staticmethod
    @asynccontextmanager
    async def running(num_executors: int, num_streams: int, vocab_size: int) -> AsyncIterator["System"]:
        """Run everything until the block ends, which begins when the scheduler is ready."""
        device = ("--step-ms", str(_STEP_MS), "--vocab-size", str(vocab_size), *room_for(num_streams))
        async with AsyncExitStack() as stack:
            executors = []
            for _ in range(num_executors):
                executors.append(await _Process.start("cold_start.executor", *device))
                stack.push_async_callback(executors[-1].kill)
            addresses = [(await executor.line("listening")).split()[-1] for executor in executors]
            ports = free_ports(0).scheduler
            own = (
                *("--cache-dir", stack.enter_context(tempfile.TemporaryDirectory())),
                *("--port", str(ports.api), "--admin-port", str(ports.admin)),
                *("--health-port", str(ports.health), "--metrics-port", str(ports.metrics)),
            )
            system = System(executors, addresses, own, f"{LOOPBACK}:{ports.api}")
            stack.push_async_callback(system.kill_scheduler)
            await system.start_scheduler()
            await system.scheduler.line('"ready"')
            yield system

    @property
    def scheduler(self) -> _Process:
        """The one that runs."""
        assert self._scheduler is not None, "it was started"
        return self._scheduler

    async def start_scheduler(self) -> None:
        """Start a scheduler, without waiting until it serves."""
        options = ("--executors", ",".join(self.addresses), *self.options, *NO_BUDGETS)
        self._scheduler = await _Process.start("paceline_scheduler", *options)

    async def kill_scheduler(self) -> float:
        """Kill the scheduler; returns the time by the wall clock."""
        for executor in self.executors:
            executor.lines.clear()
        killed_s = time.time()
        await self.scheduler.kill()
        return killed_s

    async def parts_since(self, killed_s: float) -> dict[str, float]:
        """Wait until every executor runs plans again; returns how long after the kill that and what precedes it was."""
        events = {
            "the scheduler listens": await self.scheduler.line('"listening"'),
            **{
                f"executor {i}": await self.scheduler.line("executor_attached", a) for i, a in enumerate(self.addresses)
            },
        }
        parts = {
            name: datetime.fromisoformat(json.loads(line)["timestamp"]).timestamp() - killed_s
            for name, line in events.items()
        }
        attached = max(parts.pop(name) for name in list(parts) if name.startswith("executor "))
        plans = [float((await executor.line("first plan")).split()[-1]) - killed_s for executor in self.executors]
        return parts | {"attached to all": attached, "first plan": min(plans), "first plan of all": max(plans)}

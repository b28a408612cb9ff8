"""Schedulers and simulated executors as processes of their own, for measurements: started, and their CPU time."""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from tempfile import NamedTemporaryFile
from typing import Any

# Of a scheduler: all streams run beside each other, however slowly.
NO_BUDGETS = ("--ttft-budget", "1e6", "--itl-budget", "1e6")
_TOKENS_PER_STREAM = 2080


@asynccontextmanager
async def module_process(name: str, *options: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a module as a process until the block ends."""
    command = (sys.executable, "-m", name, *options)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        await process.communicate()


def room_for(num_streams: int) -> tuple[str, ...]:
    """Options of a simulated executor that runs so many streams at once, of up to 2,000 tokens, prompts included."""
    return ("--max-num-seqs", str(num_streams), "--max-model-len", str(_TOKENS_PER_STREAM))


@asynccontextmanager
async def simulated_executor(*options: str, step_ms: float = 2.0) -> AsyncIterator[str]:
    """Run a simulated executor whose steps take so long until the block ends; yields its address."""
    with NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"points": [{"num_tokens": 1, "duration_us": step_ms * 1e3}]}, file)
        file.flush()
        ports = ("--port", "0", "--health-port", "0", "--metrics-port", "0")
        own = ("--runner", f"simulated:{file.name}")
        async with module_process("paceline_executor", *own, *ports, *options) as process:
            yield f"127.0.0.1:{(await event(process, 'ready'))['port']}"


@asynccontextmanager
async def scheduler_of(address: str, *options: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, Any]]]:
    """Run a scheduler of one executor until the block ends; yields it, ready, with the event that names its ports."""
    ports = ("--port", "0", "--admin-port", "0", "--health-port", "0", "--metrics-port", "0")
    async with module_process("paceline_scheduler", *ports, "--executors", address, *options) as process:
        yield process, await event(process, "ready")


async def event(process: asyncio.subprocess.Process, name: str) -> dict[str, Any]:
    while (logged := json.loads(await next_line(process)))["event"] != name:
        pass
    return dict(logged)


async def next_line(process: asyncio.subprocess.Process) -> str:
    """Return the next line that a process prints; RuntimeError when it has ended."""
    assert process.stdout is not None, "it was asked for"
    line = await process.stdout.readline()
    if not line:
        raise RuntimeError(f"process {process.pid} has ended")
    return line.decode()


def cpu_ns(process: asyncio.subprocess.Process) -> int:
    """Return the CPU time of a running process, all threads, in nanoseconds."""
    # The clock of another process's CPU time, as clock_getcpuclockid(3) makes it.
    return time.clock_gettime_ns((~process.pid << 3) | 2)

"""Schedulers and simulated executors as processes of their own."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from tempfile import NamedTemporaryFile
from typing import Any


@asynccontextmanager
async def module_process(name: str, *options: str) -> AsyncIterator[asyncio.subprocess.Process]:
    command = (sys.executable, "-m", name, *options)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):  # a test has killed it
            process.kill()
        await process.communicate()


@asynccontextmanager
async def simulated_executor(*options: str, step_ms: float = 2.0) -> AsyncIterator[str]:
    with NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"points": [{"num_tokens": 1, "duration_us": step_ms * 1e3}]}, file)
        file.flush()
        ports = ("--port", "0", "--health-port", "0", "--metrics-port", "0")
        own = ("--runner", f"simulated:{file.name}")
        async with module_process("paceline_executor", *own, *ports, *options) as process:
            yield f"127.0.0.1:{(await event(process, 'ready'))['port']}"


@asynccontextmanager
async def scheduler_of(address: str, *options: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, Any]]]:
    """Yields it, ready, with the event that names its ports."""
    ports = ("--port", "0", "--admin-port", "0", "--health-port", "0", "--metrics-port", "0")
    async with module_process("paceline_scheduler", *ports, "--executors", address, *options) as process:
        yield process, await event(process, "ready")


async def event(process: asyncio.subprocess.Process, name: str) -> dict[str, Any]:
    while (logged := json.loads(await next_line(process)))["event"] != name:
        pass
    return dict(logged)


async def next_line(process: asyncio.subprocess.Process) -> str:
    """Raises RuntimeError when the process has ended."""
    assert process.stdout is not None, "it was asked for"
    line = await process.stdout.readline()
    if not line:
        raise RuntimeError(f"process {process.pid} has ended")
    return line.decode()

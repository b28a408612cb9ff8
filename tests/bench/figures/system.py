"""A real system on free ports, started as users start it and drained at the end."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from paceline_client import Client, UnavailableError
from paceline_scheduler.testing.measured_processes import event, module_process
from process_groups import end_group

_BIN = Path(sys.executable).parent
_LOOK_S, _END_S = 5.0, 60.0


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the parts of the system answer."""

    api: str
    admin: str


@contextmanager
def running_system() -> Iterator[Addresses]:
    """Start `paceline up` with the default model, wait until it serves, drain it at the end.

    RuntimeError when it ends instead.
    """
    port, executor_port = _free_port(), _free_port()
    command = [str(_BIN / "paceline"), "up", "--port", str(port), "--executor-port", str(executor_port)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        with Client(f"127.0.0.1:{port}") as client:
            _wait_until_ready(client, process)
        yield Addresses(f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}")
    finally:
        end_group(process, _END_S)


def _wait_until_ready(client: Client, process: "subprocess.Popen[bytes]") -> None:
    """The model is fetched before, which takes as long as it takes."""
    while process.poll() is None:
        with contextlib.suppress(UnavailableError):
            client.wait_until_ready(_LOOK_S)
            return
    raise RuntimeError(f"`paceline up` ended with code {process.returncode}: try it alone")


async def scheduler_cold_start_s() -> float:
    """Return the time from starting the scheduler's process until its ports take connections."""
    start = time.perf_counter()
    ports = ("--port", "0", "--admin-port", "0", "--health-port", "0", "--metrics-port", "0")
    async with module_process("paceline_scheduler", "--executors", "127.0.0.1:1", *ports) as process:
        await event(process, "listening")
        return time.perf_counter() - start


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        # Neighbouring ports are used as well, so stay clear of the range that the system gives out by itself.
        return 21000 + int(probe.getsockname()[1]) % 5000

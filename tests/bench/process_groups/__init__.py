"""Programs that a benchmark runs, each in a process group of its own: whatever ends the benchmark ends all of them.

Knows processes and signals. It refuses to know what the programs do.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

_GRACE_S = 15.0


@dataclass(frozen=True, slots=True)
class Finished:
    """How a program ended, and what it printed to the pipes that it was given."""

    code: int | None  # None: its time was up
    stdout: str = ""
    stderr: str = ""


def end_with_what_was_started() -> None:
    """Let SIGTERM and SIGINT end this program by an exception, so that `run_program` and others see to their groups."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)


def run_program(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    limit_s: float | None = None,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
) -> Finished:
    """Run a program to its end, which comes at the latest after the limit, if there is one."""
    process = subprocess.Popen(
        command,
        env=None if environment is None else dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        printed, complained = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return Finished(None)
    finally:
        end_group(process)
    return Finished(process.returncode, printed or "", complained or "")


def end_group(process: "subprocess.Popen[Any]", grace_s: float = _GRACE_S) -> None:
    """Ask a process to end, and see to it that nothing stays of what it has started."""
    try:
        if process.poll() is None:
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

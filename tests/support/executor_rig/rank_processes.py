"""Executors of several ranks as processes, on one node or, each with a first process of its own, on two."""

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMMAND = (sys.executable, "-m", "paceline_executor", "--max-num-seqs", "4")
ON_CPU = ("--quantization", "none")
GENEROUS_S = 30.0
_ANY_PORTS = ("--port", "0", "--health-port", "0", "--metrics-port", "0")


@contextmanager
def ranks(
    model: Path, degree: int, options: Sequence[str] = ON_CPU
) -> Iterator[tuple[subprocess.Popen[str], int, list[int]]]:
    """The process of rank 0 once it is ready, its port, and the process ids of the others."""
    with started(model, degree, options) as process:
        yield process, event_of(process, "ready")["port"], children_of(process.pid)


@dataclass(frozen=True, slots=True)
class Nodes:
    """Two, whose first processes' children are the other ranks."""

    first: subprocess.Popen[str]
    port: int  # of the executor
    head: subprocess.Popen[str]

    @property
    def ranks_of_head(self) -> list[int]:
        """Process ids, by rank."""
        return sorted(children_of(self.head.pid))


@contextmanager
def two_nodes(
    model: Path, degree: int, options: Sequence[str] = ON_CPU, port: int = 0, joined: str | None = None
) -> Iterator[Nodes]:
    """Once they are ready. port: of node 0. joined: the address where the other one joins it, if another."""
    with started(model, degree, (*options, "--node", f"0/2@127.0.0.1:{port}")) as first:
        address = joined or f"127.0.0.1:{event_of(first, 'waiting_for_nodes')['port']}"
        with started(model, degree, (*options, "--node", f"1/2@{address}")) as head:
            yield Nodes(first, event_of(first, "ready")["port"], head)


def event_of(process: subprocess.Popen[str], event: str) -> dict[str, Any]:
    """Of a process's log. Raises AssertionError, with what it complains of, where it ends before."""
    assert process.stdout is not None
    assert process.stderr is not None
    for line in process.stdout:
        found: dict[str, Any] = json.loads(line)
        if found["event"] == event:
            return found
    raise AssertionError(process.stderr.read())


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def until_gone(pids: Iterable[int]) -> None:
    """Fails where one of them lives on."""
    for pid in pids:
        with suppress(ProcessLookupError):
            assert select.select([os.pidfd_open(pid)], [], [], GENEROUS_S)[0], pid


@contextmanager
def started(model: Path, degree: int, options: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    command = [*COMMAND, *options, "--model", str(model), "--tensor-parallel-size", str(degree), *_ANY_PORTS]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()

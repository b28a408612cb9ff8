"""What every stage is told on its command line, and how it ends. Apart from the stages, which do the work."""

import argparse
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpu.errors import GpuRunError
from gpu.report import Report


@dataclass(frozen=True, slots=True)
class Task:
    """What a stage is asked."""

    folder: Path
    """Where its files go: results, logs, what its processes need."""
    deadline: float
    """By the monotonic clock; nothing is begun after it."""
    rehearses: bool
    model: str | None
    """A real small model by its path."""
    peer: Path | None
    numbers: str | None = None
    """What alone is timed: bf16 or fp8; None is both."""

    def seconds_left(self) -> float:
        """Until the deadline."""
        return self.deadline - time.monotonic()


def run_stage(name: str, work: Callable[[Task, Callable[[str], Report]], Report]) -> int:
    """Run a stage as a program; returns its exit code: 0 if all there is was checked and measured, and is good."""
    parser = argparse.ArgumentParser(prog=f"gpu.{name}")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--model")
    parser.add_argument("--peer", type=Path)
    parser.add_argument("--numbers")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that what was started is ended
    task = Task(options.out, deadline, options.rehearse, options.model, options.peer, options.numbers)
    try:
        report = work(task, lambda device: Report(task.folder / f"{name}.json", deadline, device))
    except GpuRunError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    if report.left_out:
        print(f"{name}: not measured: {'; '.join(report.left_out)}", flush=True)
    return 0 if report.is_good and not report.left_out else 1

"""The stages: what each imports, what all are asked, and how one runs as a program. Refuses to know what stages do."""

import argparse
import enum
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from gpu.errors import GpuRunError
from gpu.report import Report


class Stage(enum.Enum):
    """In this order, whatever order they are named in."""

    KERNELS = "kernels"
    RUNNER = "runner"
    E2E = "e2e"
    DRAFTS = "drafts"
    RANKS = "ranks"
    BENCH = "bench"


_OF_MODELS = ("gguf", "safetensors", "tokenizers")
_OF_GRPC = ("grpc", "google.protobuf", "google.rpc", "grpc_health", "grpc_reflection", "grpc_status")
_OF_SERVICES = (*_OF_MODELS, *_OF_GRPC, "jinja2", "prometheus_client", "structlog", "uvloop")
NEEDED: Mapping[Stage, tuple[str, ...]] = {
    Stage.KERNELS: (),
    Stage.RUNNER: (*_OF_MODELS, "numba"),  # the CPU computes what the GPU's tokens are compared with
    Stage.E2E: _OF_SERVICES,
    Stage.DRAFTS: (*_OF_MODELS, "structlog"),
    Stage.RANKS: (*_OF_MODELS, "numba", "structlog"),
    Stage.BENCH: _OF_SERVICES,
}
"""Modules beside torch, Triton and numpy."""


@dataclass(frozen=True, slots=True)
class Task:
    """What all stages are asked."""

    folder: Path
    """Where files go: results, logs, what processes need."""
    deadline: float
    """By the monotonic clock; nothing is begun after it."""
    rehearses: bool = False
    model: str | None = None
    """A real small model by its path."""
    peer: Path | None = None
    numbers: str | None = None
    """What alone is timed: bf16 or fp8; None is both."""

    @classmethod
    def of(cls, options: argparse.Namespace, spare_s: float = 0.0) -> Self:
        """The clock starts now. spare_s: what is left when it ends, of the seconds that are asked for."""
        deadline = time.monotonic() + options.seconds - spare_s
        return cls(options.out, deadline, options.rehearse, options.model, options.peer, options.numbers)

    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def options(self) -> list[str]:
        named = {"--model": self.model, "--peer": self.peer, "--numbers": self.numbers}
        given = [str(part) for name, value in named.items() if value is not None for part in (name, value)]
        rehearses = ["--rehearse"] if self.rehearses else []
        return ["--out", str(self.folder), "--seconds", str(self.seconds_left()), *rehearses, *given]


def add_options(parser: argparse.ArgumentParser, seconds: float | None = None, out: Path | None = None) -> None:
    """Those that `Task.of` reads. seconds, out: by default."""
    parser.add_argument(
        "--out", type=Path, default=out, required=out is None, metavar="FOLDER", help="results and logs"
    )
    parser.add_argument(
        "--seconds", type=float, default=seconds, required=seconds is None, help="a stage takes at most"
    )
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU; times mean nothing")
    parser.add_argument("--model", metavar="PATH", help="a real small model for e2e; without it weights are random")
    parser.add_argument("--peer", type=Path, metavar="FILE", help="CSV of another engine's figures on this GPU")
    parser.add_argument(
        "--numbers",
        metavar="TYPE",
        help="bf16, fp8, int4, awq or experts (bf16, Qwen3-30B-A3B's shape), the only type that drafts and bench time",
    )


def run_stage(name: str, work: Callable[[Task, Callable[[str], Report]], Report]) -> int:
    """Run a stage as a program; returns its exit code: 0 if all there is was checked and measured, and is good."""
    parser = argparse.ArgumentParser(prog=f"gpu.{name}")
    add_options(parser)
    task = Task.of(parser.parse_args())
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that what was started is ended
    try:
        report = work(task, lambda device: Report(task.folder / f"{name}.json", task.deadline, device))
    except GpuRunError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    if report.left_out:
        print(f"{name}: not measured: {'; '.join(report.left_out)}", flush=True)
    return 0 if report.is_good and not report.left_out else 1

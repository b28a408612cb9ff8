"""Scheduler and executor as processes on this machine, with their logs in files: started, asked, drained.

Knows command lines, log lines and signals. It refuses to know what is asked of them.
"""

import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from gpu.errors import SystemFailedError
from paceline_cli.supervisor.programs import Ports, free_ports

START_S = 240.0  # an executor takes at most, with nothing compiled
_LOOPBACK = "127.0.0.1"
_PATIENT = ("--ttft-budget", "600")  # all requests of a cell are taken; how steps are mixed is as by default
_END_S = 60.0
_POLL_S = 0.02
_WARM_UPS = {"find": "kernels", "compile": "kernels", "capture": "captures", "measure": "measuring"}


@dataclass(slots=True)
class System:
    """Two processes that run."""

    ports: Ports
    started_s: float  # by the clock of performance counters
    executor: subprocess.Popen[bytes]
    scheduler: subprocess.Popen[bytes]
    log: Path  # of the executor
    exit_codes: dict[str, int] = field(default_factory=dict)
    told_to_end: set[str] = field(default_factory=set)

    @property
    def target(self) -> str:
        """Where clients connect to."""
        return f"{_LOOPBACK}:{self.ports.scheduler.api}"

    @property
    def admin(self) -> str:
        """Where operators do."""
        return f"{_LOOPBACK}:{self.ports.scheduler.admin}"

    def check(self) -> None:
        """Raise SystemFailedError if one of them has ended."""
        for name, process in (("executor", self.executor), ("scheduler", self.scheduler)):
            if process.poll() is not None:
                raise SystemFailedError(f"the {name} ended with code {process.returncode}: {self._last_words(name)}")

    def wait_until_ready(self, limit_s: float) -> None:
        """Until the executor says so. Raises SystemFailedError."""
        deadline = time.monotonic() + limit_s
        while not any(event["event"] == "ready" for event in self.events()):
            self.check()
            if time.monotonic() > deadline:
                raise SystemFailedError(
                    f"the executor was not ready after {limit_s:.0f} s: {self._last_words('executor')}"
                )
            time.sleep(_POLL_S)

    def events(self) -> list[dict[str, object]]:
        """What the executor has said."""
        lines = self.log.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def phases(self) -> dict[str, float]:
        """Seconds of a start, one phase after the other: reading, kernels, weights, KV cache, captures, measuring."""
        marks: list[tuple[str, float]] = []
        for event in self.events():
            name = _phase_of(event)
            if name and (not marks or marks[-1][0] != name):
                marks.append((name, datetime.fromisoformat(str(event["timestamp"])).timestamp()))
        spans = itertools.pairwise(marks)
        return {name: round(after - begun, 3) for (name, begun), (_, after) in spans}

    def drain(self, name: str) -> None:
        """Tell one of them to end in good order."""
        if name not in self.told_to_end:  # a second time would end it at once
            self.told_to_end.add(name)
            {"executor": self.executor, "scheduler": self.scheduler}[name].send_signal(signal.SIGTERM)

    def end(self) -> None:
        """Both in good order, the scheduler first; by force if that takes too long."""
        for name, process in (("scheduler", self.scheduler), ("executor", self.executor)):
            if process.poll() is None:
                self.drain(name)
            try:
                self.exit_codes[name] = process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                self.exit_codes[name] = process.wait()

    def _last_words(self, name: str) -> str:
        lines = self.log.with_name(self.log.name.replace("executor", name)).read_text(encoding="utf-8").splitlines()
        return " / ".join(line[:300] for line in lines[-2:])


def _phase_of(event: Mapping[str, object]) -> str:
    kind, phase = str(event["event"]), str(event.get("phase", ""))
    if kind == "warm_up":
        return next((name for word, name in _WARM_UPS.items() if phase.startswith(word)), "")
    if kind == "model_load":
        return f"model: {phase}" if phase != "done" else ""
    return kind if kind in ("listening", "memory", "ready") else ""


@contextmanager
def running_system(
    folder: Path, name: str, options: Sequence[str], environment: Mapping[str, str] | None = None
) -> Iterator[System]:
    """Start both, and end them after the block. options: of the executor. name: of the logs."""
    ports, started_s = free_ports(1), time.perf_counter()
    executor_ports, scheduler_ports = ports.executors[0], ports.scheduler
    executor_options = ["--port", str(executor_ports.api), "--health-port", str(executor_ports.health), *options]
    scheduler_options = ["--executors", f"{_LOOPBACK}:{executor_ports.api}", *_PATIENT]
    for option, port in (
        ("--port", scheduler_ports.api),
        ("--admin-port", scheduler_ports.admin),
        ("--health-port", scheduler_ports.health),
    ):
        scheduler_options += [option, str(port)]
    log = folder / f"executor-{name}.log"
    executor = _start("paceline_executor", executor_options, log, environment)
    scheduler = _start("paceline_scheduler", scheduler_options, folder / f"scheduler-{name}.log", environment)
    system = System(ports, started_s, executor, scheduler, log)
    try:
        yield system
    finally:
        system.end()


def _start(
    module: str, options: Sequence[str], log: Path, environment: Mapping[str, str] | None
) -> subprocess.Popen[bytes]:
    env = None if environment is None else dict(environment)
    with log.open("wb") as file:
        return subprocess.Popen([sys.executable, "-m", module, *options], stdout=file, stderr=file, env=env)

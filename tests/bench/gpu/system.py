"""Scheduler and executor as processes on this machine, with their logs in files: started, asked, drained.

Knows command lines, log lines and signals. It refuses to know what is asked of them.
"""

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from gpu.errors import GpuRunError
from paceline_cli.supervisor.programs import LOOPBACK, DeploymentPorts, free_ports

START_S = 240.0  # an executor takes at most, with nothing compiled
_PATIENT = ("--ttft-budget", "600")  # all requests of a cell are taken; how steps are mixed is as by default
_END_S = 60.0
_POLL_S = 0.02
_WARM_UPS = {"find": "kernels", "compile": "kernels", "capture": "captures", "measure": "measuring"}


@dataclass(slots=True)
class System:
    """Two processes that run."""

    ports: DeploymentPorts
    started_s: float  # by the clock of performance counters
    processes: Mapping[str, "subprocess.Popen[bytes]"]  # the scheduler, which ends first, and the executor
    logs: Mapping[str, Path]

    @property
    def target(self) -> str:
        return f"{LOOPBACK}:{self.ports.scheduler.api}"

    @property
    def admin(self) -> str:
        return f"{LOOPBACK}:{self.ports.scheduler.admin}"

    def check(self) -> None:
        for name, process in self.processes.items():
            if process.poll() is not None:
                raise GpuRunError(f"the {name} ended with code {process.returncode}: {self._last_words(name)}")

    def wait_until_ready(self, limit_s: float) -> None:
        """Until the executor says so. Raises GpuRunError."""
        deadline = time.monotonic() + limit_s
        while not any(event["event"] == "ready" for event in self.events()):
            self.check()
            if time.monotonic() > deadline:
                raise GpuRunError(f"the executor was not ready after {limit_s:.0f} s: {self._last_words('executor')}")
            time.sleep(_POLL_S)

    def events(self) -> list[dict[str, object]]:
        lines = self.logs["executor"].read_text(encoding="utf-8").splitlines()
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

    def end(self) -> None:
        """Both in good order; by force if that takes too long."""
        for process in self.processes.values():
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def check_ends(self) -> None:
        """Raise GpuRunError if one of them did not end as it should when it was told to."""
        codes = {name: process.returncode for name, process in self.processes.items()}
        if any(codes.values()):
            raise GpuRunError(f"the processes ended with {codes} when they were told to")

    def _last_words(self, name: str) -> str:
        lines = self.logs[name].read_text(encoding="utf-8").splitlines()
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
    executor, scheduler = ports.executors[0], ports.scheduler
    own: dict[str, dict[str, object]] = {
        "scheduler": {
            "--executors": f"{LOOPBACK}:{executor.api}",
            "--port": scheduler.api,
            "--admin-port": scheduler.admin,
            "--health-port": scheduler.health,
        },
        "executor": {"--port": executor.api, "--health-port": executor.health},
    }
    further = {"scheduler": _PATIENT, "executor": options}
    logs = {program: folder / f"{program}-{name}.log" for program in own}
    processes = {}
    for program in ("executor", "scheduler"):
        given = [str(part) for option in own[program].items() for part in option]
        command = [sys.executable, "-m", f"paceline_{program}", *given, *further[program]]
        with logs[program].open("wb") as log:
            processes[program] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    system = System(ports, started_s, {program: processes[program] for program in own}, logs)
    try:
        yield system
    finally:
        system.end()

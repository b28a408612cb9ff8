"""The stage of figures: the whole system, then the engine alone, for each type of numbers, beside bars and a peer.

Knows the order: the system first, because its start is timed with nothing compiled. Knows no cell.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from gpu.bars import read_peer, table
from gpu.bench_models import Timed, timed
from gpu.cells import START, START_PHASE, WARM_START, WARM_START_PHASE
from gpu.config import compiling_into
from gpu.errors import CheckFailedError
from gpu.loading import loading_figures
from gpu.report import Figure, Report
from gpu.rigs import EXPERTS, find_place, free_unused_memory, timed_numbers
from gpu.stage import Task, run_stage
from gpu.system import START_S, System, running_system
from gpu.system_cells import SystemCells, patient_client

_MIN_LOADING_S = 240.0  # it writes 16 GB and reads them five times
_MIN_SECONDS = 45.0  # less time is no use to a side
_AGAIN_S = 30.0  # of a system's time, for its second start
_SYSTEM_SHARE = 1.5  # of its time and the engine's, in the engine's: it starts twice


def work(task: Task, report_on: Callable[[str], Report]) -> Report:
    """Every side of every type of numbers, as long as there is time; the table comes last, whatever went wrong."""
    peers = read_peer(task.peer)
    place = find_place(rehearses=task.rehearses)
    names = timed_numbers(place, task.numbers)
    report, what = report_on(place.name), timed(rehearses=task.rehearses, numbers=task.numbers)
    if names == [EXPERTS]:
        print("loading is timed of other numbers", flush=True)
    elif task.rehearses or task.seconds_left() > _MIN_LOADING_S:
        loading = partial(loading_figures, place, names, what.config, task.folder)
        report.check("loading", partial(report.measured, loading))
    else:
        report.leave_out("loading: the time is short")
    del place  # its context stays, its memory does not
    free_unused_memory()
    sides = [(numbers, share) for numbers in names for share in (_SYSTEM_SHARE, 1.0)]
    try:
        with tempfile.TemporaryDirectory(prefix="paceline-compiled-") as compiled:
            for index, (numbers, share) in enumerate(sides):
                seconds = task.seconds_left() * share / sum(share for _, share in sides[index:])
                name = "engine" if share == 1.0 else "system"
                if seconds < _MIN_SECONDS and not task.rehearses:
                    report.leave_out(f"{numbers} {name}: the time was up")
                    continue
                environment = compiling_into(Path(compiled) / numbers)
                side = _Side(replace(task, numbers=numbers), report, what, seconds, environment)
                {"engine": side.measure_engine, "system": side.measure_system}[name]()
    finally:
        if task.rehearses:
            print("A rehearsal: what follows means nothing.")
        print("\n".join(table(report.figures, peers)), flush=True)
    return report


@dataclass(frozen=True, slots=True)
class _Side:
    """One type of numbers, by system or engine."""

    task: Task
    report: Report
    what: Timed
    seconds: float
    environment: Mapping[str, str]

    @property
    def numbers(self) -> str:
        return self.task.numbers or ""

    def measure_system(self) -> None:
        """Start it with nothing compiled, measure all cells, and start it once more."""
        options = self.what.executor_options(self.task.folder, self.numbers, is_twin=self.task.rehearses)
        deadline = time.monotonic() + self.seconds
        self.report.check(f"{self.numbers} system", partial(self._run_system, options, deadline - _AGAIN_S))
        if not self.task.rehearses and time.monotonic() <= deadline:
            again = partial(self._start_again, options)
            self.report.check(f"{self.numbers} system, compiled before", again)

    def _run_system(self, options: list[str], deadline: float) -> str:
        folder = self.task.folder
        with running_system(folder, self.numbers, options, self.environment) as system, asyncio.Runner() as loop:
            system.wait_until_ready(min(self.seconds, START_S))
            self._add_start(START, loop.run(_first_token(system)))
            cells = loop.run(SystemCells.connect(system, self.numbers, self.what))
            try:
                for cell in self.what.shapes.cells():
                    if time.monotonic() > deadline:
                        self.report.leave_out(f"{self.numbers} system {cell}: the time was up")
                        continue
                    system.check()
                    measure = partial(self.report.measured, lambda cell=cell: loop.run(cells.measure(cell)))  # type: ignore[misc]
                    self.report.check(f"{self.numbers} system {cell}", measure)
            finally:
                loop.run(cells.close())
        system.check_ends()
        return self._phases(START_PHASE, system)

    def _start_again(self, options: list[str]) -> str:
        with running_system(self.task.folder, f"{self.numbers}-again", options, self.environment) as system:
            system.wait_until_ready(START_S)
            self._add_start(WARM_START, asyncio.run(_first_token(system)))
        return self._phases(WARM_START_PHASE, system)

    def _add_start(self, what: str, seconds: float) -> None:
        self.report.add([Figure(self.numbers, what, "", "s", system=seconds)])

    def _phases(self, what: str, system: System) -> str:
        """Those of an executor's start, as figures and as a sentence."""
        phases = system.phases()
        figures = [Figure(self.numbers, what, phase, "s", system=seconds) for phase, seconds in phases.items()]
        self.report.add(figures)
        return f"started in: {', '.join(f'{phase} {seconds:.1f} s' for phase, seconds in phases.items())}"

    def measure_engine(self) -> None:
        """In a process of its own."""
        self.report.check(f"{self.numbers} engine", self._run_engine)

    def _run_engine(self) -> str:
        task = replace(self.task, deadline=time.monotonic() + 0.8 * self.seconds)
        file = task.folder / f"engine-{self.numbers}.json"
        file.unlink(missing_ok=True)  # of an earlier run
        command = [sys.executable, "-m", "gpu.engine_side", *task.options()]
        code: int | str = "none in time"
        with contextlib.suppress(subprocess.TimeoutExpired):
            limit_s = self.seconds + 30
            code = subprocess.run(command, env=self.environment, timeout=limit_s, check=False).returncode
        found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"figures": [], "left_out": []}
        self.report.add([Figure(**figure) for figure in found["figures"]])
        self.report.left_out += found["left_out"]
        if code != 0 and not (code == 1 and found["left_out"] and found["is_good"]):
            raise CheckFailedError(f"the engine's process ended with {code}, after {len(found['figures'])} figures")
        return f"{len(found['figures'])} figures"


async def _first_token(system: System) -> float:
    """Seconds from the start of the processes to a client's first token."""
    async with patient_client(system.target) as client:
        await client.wait_until_ready(START_S)
        result = await client.generate(token_ids=[5, 6, 7], stopping={"max_tokens": 1, "ignore_eos": True})
    if not result.completions[0].token_ids:
        raise CheckFailedError("a request for one token brought none")
    return time.perf_counter() - system.started_s


if __name__ == "__main__":
    sys.exit(run_stage("bench", work))

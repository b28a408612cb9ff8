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
from functools import partial
from pathlib import Path

import grpc.aio

from gpu.bars import table
from gpu.bench_models import Timed, timed
from gpu.cells import START, START_PHASE, WARM_START, WARM_START_PHASE, Cell
from gpu.config import compiling_into
from gpu.engine_cells import flops_of
from gpu.errors import CheckFailedError, DoesNotFitError
from gpu.loading import loading_figures
from gpu.peer import read_peer
from gpu.report import Figure, Report
from gpu.rigs import Place, find_place, free_unused_memory, timed_numbers
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
    report, what = report_on(place.name), timed(rehearses=task.rehearses)
    if task.rehearses or task.seconds_left() > _MIN_LOADING_S:
        report.check("loading", partial(_load, report, place, what, task.folder))
    else:
        report.leave_out("loading: the time is short")
    del place  # its context stays, its memory does not
    free_unused_memory()
    both = (_system_side, _SYSTEM_SHARE), (_engine_side, 1.0)
    sides = [(numbers, side, share) for numbers in names for side, share in both]
    try:
        with tempfile.TemporaryDirectory(prefix="paceline-compiled-") as compiled:
            for index, (numbers, side, share) in enumerate(sides):
                seconds = task.seconds_left() * share / sum(share for *_, share in sides[index:])
                if seconds < _MIN_SECONDS and not task.rehearses:
                    report.leave_out(f"{numbers}: {side.__name__.strip('_')}: the time was up")
                    continue
                environment = compiling_into(Path(compiled) / numbers)
                side(task, report, what, numbers, seconds, environment)
    finally:
        if task.rehearses:
            print("A rehearsal: what follows means nothing.")
        print("\n".join(table(report.figures, peers)), flush=True)
    return report


def _load(report: Report, place: Place, what: Timed, folder: Path) -> str:
    figures = loading_figures(place, what.config, folder)
    report.add(figures)
    return ", ".join(f"{one.engine:.3g} {one.unit} {one.shape}".strip() for one in figures)


def _system_side(
    task: Task, report: Report, what: Timed, numbers: str, seconds: float, environment: Mapping[str, str]
) -> None:
    options = what.executor_options(task.folder, numbers, is_twin=task.rehearses)
    deadline = time.monotonic() + seconds

    def run() -> str:
        with running_system(task.folder, numbers, options, environment) as system:
            system.wait_until_ready(min(seconds, START_S))
            asyncio.run(_cells(report, what, numbers, system, deadline - _AGAIN_S))
        codes = [code for code in system.exit_codes.values() if code]
        if codes:
            raise CheckFailedError(f"the processes ended with {system.exit_codes} when they were told to")
        return _started(report, numbers, START_PHASE, system)

    report.check(f"{numbers} system", run)
    if task.rehearses or time.monotonic() > deadline:
        return
    report.check(
        f"{numbers} system, compiled before", partial(_start_again, report, task, numbers, options, environment)
    )


def _start_again(report: Report, task: Task, numbers: str, options: list[str], environment: Mapping[str, str]) -> str:
    with running_system(task.folder, f"{numbers}-again", options, environment) as system:
        system.wait_until_ready(START_S)
        seconds = asyncio.run(_first_token(system))
    report.add([Figure(numbers, WARM_START, "", "s", system=seconds)])
    return _started(report, numbers, WARM_START_PHASE, system)


def _started(report: Report, numbers: str, what: str, system: System) -> str:
    """The phases of an executor's start, as figures and as a sentence."""
    phases = system.phases()
    report.add([Figure(numbers, what, phase, "s", system=seconds) for phase, seconds in phases.items()])
    return f"started in: {', '.join(f'{phase} {seconds:.1f} s' for phase, seconds in phases.items())}"


async def _first_token(system: System) -> float:
    """Seconds from the start of the processes to a client's first token."""
    async with patient_client(system.target) as client:
        await client.wait_until_ready(START_S)
        result = await client.generate(token_ids=[5, 6, 7], stopping={"max_tokens": 1, "ignore_eos": True})
    if not result.completions[0].token_ids:
        raise CheckFailedError("a request for one token brought none")
    return time.perf_counter() - system.started_s


async def _cells(report: Report, what: Timed, numbers: str, system: System, deadline: float) -> None:
    report.add([Figure(numbers, START, "", "s", system=await _first_token(system))])
    async with patient_client(system.target) as client, grpc.aio.insecure_channel(system.admin) as operators:
        flops = partial(flops_of, what.config)
        cells = SystemCells(numbers, client, operators, what.config.vocab_size, what.shapes, flops, what.max_tokens)
        for cell in what.shapes.cells():
            if time.monotonic() > deadline:
                report.leave_out(f"{numbers} system {cell}: the time was up")
                continue
            system.check()
            await _measure(report, cells, cell)


async def _measure(report: Report, cells: SystemCells, cell: Cell) -> None:
    """One cell; what fails is a check that failed, and the next one is still worth knowing."""
    name, begun = f"{cells.numbers} system {cell}", time.monotonic()
    try:
        figures = await cells.measure(cell)
    except DoesNotFitError as error:
        report.leave_out(f"{name}: {error}")
        return
    except Exception as error:
        report.failed(name, error, time.monotonic() - begun)
        return
    report.add(figures)
    report.passed(name, ", ".join(f"{one.system:.4g} {one.unit}" for one in figures), time.monotonic() - begun)


def _engine_side(
    task: Task, report: Report, what: Timed, numbers: str, seconds: float, environment: Mapping[str, str]
) -> None:
    del what  # it makes its own
    command = [sys.executable, "-m", "gpu.engine_side", "--out", str(task.folder), "--numbers", numbers]
    command += ["--seconds", str(seconds * 0.8), *(["--rehearse"] if task.rehearses else [])]

    def run() -> str:
        code: int | str = "none in time"
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = subprocess.run(command, env=dict(environment), timeout=seconds + 30, check=False).returncode
        file = task.folder / f"engine-{numbers}.json"
        num_figures = _take(report, file)
        if code != 0:
            raise CheckFailedError(f"the engine's process ended with {code}, after {num_figures} figures")
        return f"{num_figures} figures"

    report.check(f"{numbers} engine", run)


def _take(report: Report, file: Path) -> int:
    if not file.exists():
        return 0
    found = json.loads(file.read_text(encoding="utf-8"))
    figures = [Figure(**figure) for figure in found["figures"]]
    report.add(figures)
    report.left_out += found["left_out"]
    return len(figures)


if __name__ == "__main__":
    sys.exit(run_stage("bench", work))

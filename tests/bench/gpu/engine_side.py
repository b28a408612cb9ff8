"""One type of numbers, by the engine alone: a process of its own, so that its memory is free for others after it.

Knows the order of cells. Its figures go into engine-NUMBERS.json.
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path

from gpu.bench_models import Timed, timed
from gpu.engine_cells import EngineCells
from gpu.report import Report
from gpu.rigs import Place, find_place, make_rig, random_model
from paceline_executor.limits import RowLimits
from paceline_executor.models.llama import LlamaModel


def main() -> int:
    """The exit code: 0 if every cell that was begun could be measured."""
    parser = argparse.ArgumentParser(prog="gpu.engine_side")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--numbers", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    place, what = find_place(rehearses=options.rehearse), timed(rehearses=options.rehearse)
    file = options.out / f"engine-{options.numbers}.json"
    report = Report(file, time.monotonic() + options.seconds, place.name)
    limits = what.limits(place, place.numerics[options.numbers])  # by what is free before the weights are there
    model = random_model(place, what.config, place.numerics[options.numbers], limits.max_model_len)
    _measure_cells(report, place, what, options.numbers, model, limits)
    return 0 if report.is_good else 1


def _measure_cells(
    report: Report, place: Place, what: Timed, numbers: str, model: LlamaModel, limits: RowLimits
) -> None:
    begun, numerics = time.perf_counter(), place.numerics[numbers]
    rig = make_rig(place, model, what.config, limits, numerics)
    print(f"{numbers}: engine ready after {time.perf_counter() - begun:.1f} s", flush=True)
    cells = EngineCells(numbers, rig, what.config, what.shapes)
    for cell in (*what.shapes.cells(), *what.shapes.engine_cells()):
        report.check(f"{numbers} engine {cell}", partial(report.measured, partial(cells.measure, cell)))


if __name__ == "__main__":
    sys.exit(main())

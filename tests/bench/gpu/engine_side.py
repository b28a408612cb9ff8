"""One type of numbers, by the engine alone: a process of its own, so that its memory is free for others after it.

Knows the order of cells. Its figures go into engine-NUMBERS.json.
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path

from gpu.bench_models import timed
from gpu.cells import Cell
from gpu.engine_cells import EngineCells
from gpu.report import Report
from gpu.rigs import find_place, make_rig, random_model


def main() -> int:
    """The exit code: 0 if every cell that was begun could be measured."""
    parser = argparse.ArgumentParser(prog="gpu.engine_side")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--numbers", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    place, what = find_place(rehearses=options.rehearse), timed(rehearses=options.rehearse)
    deadline = time.monotonic() + options.seconds
    report = Report(options.out / f"engine-{options.numbers}.json", deadline, place.name)
    numerics = place.numerics[options.numbers]
    begun = time.perf_counter()
    limits = what.limits(place, numerics)
    model = random_model(place, what.config, numerics, limits.max_model_len)
    rig = make_rig(place, model, what.config, limits, numerics)
    print(f"{options.numbers}: engine ready after {time.perf_counter() - begun:.1f} s", flush=True)
    cells = EngineCells(options.numbers, rig, what.config, what.shapes)

    def measured(cell: Cell) -> str:
        figures = cells.measure(cell)
        report.add(figures)
        return ", ".join(f"{figure.engine:.4g} {figure.unit}" for figure in figures)

    for cell in what.shapes.cells():
        report.check(f"{options.numbers} engine {cell}", partial(measured, cell))
    return 0 if report.is_good else 1


if __name__ == "__main__":
    sys.exit(main())

"""One type of numbers, by the engine alone: a process of its own, so that its memory is free for others after it.

Knows the order of cells. Its figures go into engine-NUMBERS.json.
"""

import sys
import time
from collections.abc import Callable
from functools import partial

from gpu.bench_models import timed
from gpu.engine_cells import EngineCells
from gpu.report import Report
from gpu.rigs import find_place, make_feed, random_model
from gpu.stage import Task, run_stage


def work(task: Task, report_on: Callable[[str], Report]) -> Report:
    """All cells, as long as there is time."""
    place, numbers = find_place(rehearses=task.rehearses), task.numbers or ""
    what = timed(rehearses=task.rehearses, numbers=numbers)
    report, numerics, begun = report_on(place.name), place.numerics[numbers], time.perf_counter()
    report.file = task.folder / f"engine-{numbers}.json"
    limits = what.limits(place, numbers)  # by what is free before the weights are there
    model = random_model(place, what.config, numbers, limits.max_model_len)
    feed = make_feed(place, model, what.config, limits, numerics)
    print(f"{numbers}: engine ready after {time.perf_counter() - begun:.1f} s", flush=True)
    cells = EngineCells(numbers, feed, what.config, what.shapes)
    for cell in (*what.shapes.cells(), *what.shapes.engine_cells()):
        report.check(f"{numbers} engine {cell}", partial(report.measured, partial(cells.measure, cell)))
    report.write()
    return report


if __name__ == "__main__":
    sys.exit(run_stage("engine", work))

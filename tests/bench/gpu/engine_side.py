"""One type of numbers, by the engine alone: a process of its own, so that its memory is free for others after it.

Knows the order of cells. Its figures go into engine-NUMBERS.json.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from gpu.bench_models import Timed, timed
from gpu.cells import drafts_at
from gpu.drafted_cells import DraftedCells, ScriptedDrafter, overwriting, tell_nothing_apart
from gpu.drafting_models import TimedDrafter, bytes_read, timed_drafter
from gpu.engine_cells import EngineCells
from gpu.report import Figure, Report
from gpu.rigs import Place, copy_rate, find_place, free_unused_memory, make_rig, random_model
from paceline_executor.device_numerics import DeviceNumerics
from paceline_executor.limits import RowLimits
from paceline_executor.models.llama import LlamaModel
from paceline_executor.runner.device.drafts import launching

_FOR_DRAFTS = 0.4  # of the time


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
    file = options.out / f"engine-{options.numbers}.json"
    report = Report(file, deadline - _FOR_DRAFTS * options.seconds, place.name)
    limits = what.limits(place, place.numerics[options.numbers])  # by what is free before the weights are there
    model = random_model(place, what.config, place.numerics[options.numbers], limits.max_model_len)
    _measure_cells(report, place, what, options.numbers, model, limits)
    free_unused_memory()
    report.deadline = deadline
    tell_nothing_apart(model)
    for drafter in ("", *what.drafters):
        name = f"{options.numbers} engine with drafts{drafter and f' by {drafter}'}"
        report.check(name, partial(_measure_drafts, report, place, what, options.numbers, model, drafter))
        free_unused_memory()
    return 0 if report.is_good else 1


def _measure_cells(
    report: Report, place: Place, what: Timed, numbers: str, model: LlamaModel, limits: RowLimits
) -> None:
    begun, numerics = time.perf_counter(), place.numerics[numbers]
    rig = make_rig(place, model, what.config, limits, numerics)
    print(f"{numbers}: engine ready after {time.perf_counter() - begun:.1f} s", flush=True)
    cells = EngineCells(numbers, rig, what.config, what.shapes)
    for cell in what.shapes.cells():
        report.check(f"{numbers} engine {cell}", partial(_measured, report, partial(cells.measure, cell)))
    for rows, context in what.shapes.mixed:
        name = f"{numbers} engine {rows} decodes of {context} and a prompt"
        report.check(name, partial(_measured, report, partial(cells.mixed, rows, context)))


def _measure_drafts(report: Report, place: Place, what: Timed, numbers: str, model: LlamaModel, drafter: str) -> str:
    """Another engine for steps that verify drafts; its cells are checks of their own. drafter: empty for none."""
    limits, numerics = what.drafted_limits(), place.numerics[numbers]
    script = ScriptedDrafter(limits, place.device.torch_device)
    drafting, floor_ms = launching(script, limits.max_num_draft_tokens), None
    if drafter:
        found = timed_drafter(what.drafters[drafter], place, numerics, limits, model)
        drafting = overwriting(found.make, drafting)
        floor_ms = partial(_floor_ms, copy_rate(place), what, numerics, found)
    rig = make_rig(place, model, what.config, limits, numerics, drafting=drafting)
    cells = DraftedCells(numbers, rig, script, what.shapes, drafter, floor_ms)
    for num_rows, num_drafts in what.shapes.modelled if drafter else what.shapes.drafted:
        name = f"{numbers} engine {drafts_at(num_rows, num_drafts, drafter)}"
        report.check(name, partial(_measured, report, partial(cells.measure, num_rows, num_drafts)))
    report.add(cells.best())
    return f"{limits.num_rows} rows with up to {limits.max_num_draft_tokens} drafts"


def _floor_ms(
    rate: float, what: Timed, numerics: DeviceNumerics, found: TimedDrafter, num_rows: int, num_drafts: int
) -> float:
    """What target and drafter read at the rate of a copy: the weights once a pass, and the target's KV cache."""
    slots = num_rows * what.shapes.drafted_context
    target = bytes_read(what.config, numerics) + slots * numerics.bytes_per_token(what.config)
    return 1e3 * (target + found.step_bytes + num_drafts * found.pass_bytes) / rate


def _measured(report: Report, measure: Callable[[], list[Figure]]) -> str:
    figures = measure()
    report.add(figures)
    return ", ".join(f"{figure.engine:.4g} {figure.unit}" for figure in figures)


if __name__ == "__main__":
    sys.exit(main())

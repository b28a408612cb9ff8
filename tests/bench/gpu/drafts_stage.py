"""The stage of drafts: what steps cost that verify them, and what they bring, for each type of numbers and drafter.

Knows which engines there are, one after the other on the same weights. `drafted_cells` knows how one is measured.
"""

import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from gpu.bars import table
from gpu.bench_models import Timed, timed
from gpu.cells import drafts_at
from gpu.config import kernels_folder
from gpu.drafted_cells import DraftedCells, ScriptedDrafter, overwriting, tell_nothing_apart
from gpu.drafting_models import shape_of, timed_drafter
from gpu.report import Report
from gpu.rigs import Place, find_place, free_unused_memory, make_feed, random_model, stored_types, timed_numbers
from gpu.stage import Task, run_stage
from paceline_executor.limits import RowLimits
from paceline_executor.models.llama import LlamaModel
from paceline_executor.numerics import Numerics
from paceline_executor.runner.device.buckets import buckets_of
from paceline_executor.runner.device.drafts import launching
from paceline_executor.start.kernel_compiling import Steps, have_compiled
from paceline_kernels.attention import Splits


def work(task: Task, report_on: Callable[[str], Report]) -> Report:
    """Scripts alone first, then behind each kind of drafter."""
    place, what = find_place(rehearses=task.rehearses), timed(rehearses=task.rehearses, numbers=task.numbers)
    report = report_on(place.name)
    names = timed_numbers(place, task.numbers)
    num_left = len(names) * (1 + len(what.drafters))
    print(f"drafts on {place.name}", flush=True)
    try:
        for numbers in names:
            model = random_model(place, what.config, numbers, what.drafted_limits().max_model_len)
            tell_nothing_apart(model)
            plain_ms: dict[int, float] = {}
            for drafter in ("", *what.drafters):
                report.deadline, num_left = time.monotonic() + task.seconds_left() / num_left, num_left - 1
                name = f"{numbers} engine with drafts{drafter and f' by {drafter}'}"
                report.check(name, partial(_measure, report, place, what, numbers, model, plain_ms, drafter))
                free_unused_memory()
            del model
            free_unused_memory()
    finally:
        print("\n".join(table(report.figures, {})), flush=True)
    return report


def _measure(
    report: Report,
    place: Place,
    what: Timed,
    numbers: str,
    model: LlamaModel,
    plain_ms: dict[int, float],
    drafter: str,
) -> str:
    """The cells of one engine are checks of their own. drafter: empty for none."""
    begun, limits, numerics = time.monotonic(), what.drafted_limits(), place.numerics[numbers]
    if place.is_cuda:
        _compile(what, numbers, numerics, limits, drafter)
    cells = scripted_cells(place, what, numbers, model, plain_ms, drafter)
    seconds = time.monotonic() - begun
    for num_rows, num_drafts in what.shapes.modelled if drafter else what.shapes.drafted:
        name = f"{numbers} engine {drafts_at(num_rows, num_drafts, drafter)}"
        report.check(name, partial(report.measured, partial(cells.measure, num_rows, num_drafts)))
    report.add(cells.best())
    return f"{limits.num_rows} rows with up to {limits.max_num_draft_tokens} drafts, ready after {seconds:.1f} s"


def scripted_cells(
    place: Place, what: Timed, numbers: str, model: LlamaModel, plain_ms: dict[int, float], drafter: str
) -> DraftedCells:
    """An engine whose drafts are a script's, behind this drafter if any."""
    limits, numerics = what.drafted_limits(), place.numerics[numbers]
    script = ScriptedDrafter(limits, place.device.torch_device)
    drafting = launching(script, limits.max_num_draft_tokens)
    if drafter:
        drafting = overwriting(timed_drafter(what.drafters[drafter], place, numerics, limits, model), drafting)
    feed = make_feed(place, model, what.config, limits, numerics, drafting=drafting)
    return DraftedCells(numbers, feed, script, what.shapes, plain_ms, drafter)


def _compile(what: Timed, numbers: str, numerics: Numerics, limits: RowLimits, drafter: str) -> None:
    """By all cores at once, as an executor does when it starts."""
    buckets = buckets_of(limits.num_rows, limits.max_num_batched_tokens, limits.max_num_draft_tokens)
    shape = shape_of(what.drafters[drafter], numerics) if drafter else None
    steps = Steps(what.config, numerics, stored_types(what.config, numbers), limits, buckets, Splits.EVEN, shape)
    have_compiled(steps, torch.cuda.get_device_capability(), kernels_folder(), lambda _phase, _fraction: None)


if __name__ == "__main__":
    sys.exit(run_stage("drafts", work))

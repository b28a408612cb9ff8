"""What recording costs a step: `python -m scheduler_cost.recording_cost [--rows 256 32]`.

Drives a core whose rows all decode, in one process without sockets. Each step is recorded by one of three recorders in
turn (none, raw, stand-ins), so that all meet the same load, and its CPU time, that of the writing thread included, is
taken. Prints the medians.
"""

import argparse
import tempfile
import time
from collections import defaultdict
from itertools import cycle
from pathlib import Path
from statistics import median

from both_sides.audited import make_executor
from paceline.plan.values import BatchPlan
from paceline_scheduler.core.core import Core
from paceline_scheduler.core.events import ExecutorAttached, StepFinished, Submit
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.recording.recorder import Recorder
from paceline_scheduler.testing.requests import make_request

_ADDRESS = "executor-0"
_WARM_UP = 20
_BLOCK = 16


def main() -> None:
    """Print a line for each number of rows."""
    parser = argparse.ArgumentParser(description="Measure what recording costs a step.")
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 32], help="default 256 32")
    parser.add_argument("--steps", type=int, default=600, help="of each kind (default 600)")
    options = parser.parse_args()
    for num_rows in options.rows:
        costs = measure(num_rows, options.steps)
        without = costs.pop("none")
        told = ", ".join(f"{name} +{cost - without:.0f} us" for name, cost in costs.items())
        print(f"{num_rows} rows: core and plan {without:.0f} us per step; {told}", flush=True)


def measure(num_rows: int, num_steps: int) -> dict[str, float]:
    """Return the median CPU time of a step, in microseconds, by how it is recorded."""
    length = 3 * (num_steps + _WARM_UP) + 64
    executor = make_executor(
        num_blocks=num_rows * (length // _BLOCK + 2),
        block_size=_BLOCK,
        max_num_rows=num_rows,
        max_num_batched_tokens=8192,
        max_model_len=length,
        max_plans_in_flight=1,
    )
    core = Core(CoreLimits(itl_budget_s=1e6, ttft_budget_s=1e6, max_plans_in_flight=1, run_ahead_s=0.0))
    with tempfile.TemporaryDirectory() as folder:
        recorders: dict[str, Recorder | None] = {"none": None}
        for name in ("raw", "stand-ins"):
            recorders[name] = Recorder(lambda: core.state, Path(folder), "scheduler-1")
        description, snapshot = executor.attach(_ADDRESS)
        now = 1.0
        core.apply(ExecutorAttached(description, snapshot), now)
        for number in range(num_rows):
            core.apply(Submit((make_request([number, 7, 9] * 8, length - 40),)), now)
        taken: dict[str, list[float]] = defaultdict(list)
        plan = core.plan(_ADDRESS, now)
        for number, name in zip(range(3 * (num_steps + _WARM_UP)), cycle(recorders), strict=False):
            if number == 3 * _WARM_UP:
                for each, recorder in recorders.items():
                    if recorder is not None:
                        recorder.start(each, is_raw=each == "raw")
            now += 0.01
            assert plan is not None, "rows decode"
            executor.receive(plan)
            event = StepFinished(_ADDRESS, executor.run_next())
            begun_ns = time.process_time_ns()
            plan = _step(core, event, now, recorders[name])
            if number >= 3 * _WARM_UP:
                taken[name].append((time.process_time_ns() - begun_ns) / 1e3)
        for recorder in recorders.values():
            if recorder is not None:
                recorder.close()
    return {name: median(costs) for name, costs in taken.items()}


def _step(core: Core, event: StepFinished, now: float, recorder: Recorder | None) -> BatchPlan | None:
    """Feed a result and plan until there is nothing to plan, as a runtime does; returns the plan."""
    effects = core.apply(event, now)
    if recorder is not None:
        recorder.saw(event, now, effects)
    found: BatchPlan | None = None
    while True:
        plan = core.plan(_ADDRESS, now)
        if recorder is not None:
            recorder.planned(_ADDRESS, now, plan, 0)
        if plan is None:
            return found
        found = plan


if __name__ == "__main__":
    main()

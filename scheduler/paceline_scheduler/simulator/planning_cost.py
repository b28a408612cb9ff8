"""What planning costs: `python -m paceline_scheduler.simulator.planning_cost [--num-rows 256]`.

Runs decode-only steps of a full batch against an executor that answers at once, and prints the scheduler's own CPU time
per step: planning it and applying its result, without network and without the edge.
"""

import argparse
import statistics
import time

import numpy as np

from paceline_scheduler.core.core import Core
from paceline_scheduler.core.executors import ExecutorDescription, Snapshot, StepPoint
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.plan import BatchPlan, StepResult, StepTimings
from paceline_scheduler.core.request import Request, RequestKey, SamplingParams

_ADDRESS = "here"
_PROMPT_TOKENS = 64


def measure(num_rows: int, num_steps: int) -> list[tuple[float, float]]:
    """Return (planning, applying) times in microseconds of decode-only steps with `num_rows` running requests."""
    core = Core(CoreLimits())
    core.attach(_description(num_rows, num_steps), Snapshot())
    for handle in range(num_rows):
        core.submit(_request(handle), now=0.0)
    times = []
    num_measured = 0
    while num_measured < num_steps:
        start = time.thread_time_ns()
        plan = core.plan(_ADDRESS, 0.0)
        planned = time.thread_time_ns()
        assert plan is not None, "requests without an end are always planned"
        result = _result(plan, core)
        received = time.thread_time_ns()
        core.complete(_ADDRESS, result)
        applied = time.thread_time_ns()
        if len(plan.rows) == num_rows and plan.num_tokens == num_rows:
            times.append(((planned - start) / 1e3, (applied - received) / 1e3))
            num_measured += 1
    return times


def main() -> None:
    """Print medians and the 99th percentile."""
    parser = argparse.ArgumentParser(description="Measure what planning a decode-only step costs the scheduler.")
    parser.add_argument("--num-rows", type=int, default=256, help="running requests (default 256)")
    parser.add_argument("--num-steps", type=int, default=2000, help="steps to measure (default 2000)")
    arguments = parser.parse_args()
    times = measure(arguments.num_rows, arguments.num_steps)
    totals = sorted(plan + apply for plan, apply in times)
    plan_us = statistics.median(plan for plan, _ in times)
    apply_us = statistics.median(apply for _, apply in times)
    print(
        f"{arguments.num_rows} rows: {statistics.median(totals):.0f} us per step "
        f"(plan {plan_us:.0f}, apply {apply_us:.0f}), p99 {totals[int(len(totals) * 0.99)]:.0f} us"
    )


def _description(num_rows: int, num_steps: int) -> ExecutorDescription:
    max_model_len = _PROMPT_TOKENS + num_steps + 80
    return ExecutorDescription(
        address=_ADDRESS,
        incarnation=1,
        epoch=1,
        model="none",
        num_blocks=num_rows * (max_model_len // 16 + 2),
        block_size=16,
        max_num_rows=num_rows,
        max_num_batched_tokens=8192,
        max_model_len=max_model_len,
        max_plans_in_flight=2,
        tag_key=bytes(32),
        step_points=(StepPoint(1, 1_000_000), StepPoint(8192, 20_000_000)),
    )


def _request(handle: int) -> Request:
    # Prompts of different lengths, so that about as many rows begin a new block in every step.
    prompt = (np.arange(_PROMPT_TOKENS + handle % 16, dtype=np.int32) + handle * 131) % 32000
    sampling = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
    return Request(handle, RequestKey("", f"request-{handle}"), "none", prompt, sampling, end_token_ids=())


def _result(plan: BatchPlan, core: Core) -> StepResult:
    """Answer with one token for every row that has computed all it knew."""
    executor = core.executor(_ADDRESS)
    rows = executor.rows
    reached = (rows.num_scheduled[plan.rows] >= rows.target[plan.rows]).astype(np.int32)
    return StepResult(
        incarnation=1,
        epoch=1,
        step_id=plan.step_id,
        rows=plan.rows,
        num_accepted=reached,
        token_ids=np.full(int(reached.sum()), plan.step_id % 32000, dtype=np.int32),
        finishes=np.zeros(len(plan.rows), dtype=np.uint8),
        grant_hash=executor.in_flight[0].grant_hash,
        timings=StepTimings(forward_ns=10_000_000),
    )


if __name__ == "__main__":
    main()

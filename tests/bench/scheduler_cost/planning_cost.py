"""What planning costs: `python -m scheduler_cost.planning_cost [--num-rows 256] [--num-waiting 10000]`.

Runs steps of a full batch that only decodes, against an executor that answers at once, and prints the scheduler's own
CPU time per step: planning it, applying its result, and keeping both for metrics, without network and edge. With
requests that wait it also prints the process's memory.
"""

import argparse
import resource
import statistics
import time
from collections.abc import Callable

import numpy as np

from paceline.plan.sampling import SamplingParams
from paceline.plan.values import BatchPlan, RecordId, StepPoint, StepResult, StepTimings
from paceline.process.metrics import Meter
from paceline_scheduler.core.core import Core
from paceline_scheduler.core.events import ExecutorAttached, StepFinished, Submit
from paceline_scheduler.core.executor.attachment import Attachment
from paceline_scheduler.core.executors import ExecutorDescription, Snapshot
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.request import Request
from paceline_scheduler.observers.definitions import COUNTED
from paceline_scheduler.observers.serving import ServingObserver

_ADDRESS = "here"
_PROMPT_TOKENS = 64
_WAITING_PROMPT_TOKENS = 2000


def measure(num_rows: int, num_steps: int, num_waiting: int = 0) -> list[tuple[float, float, float]]:
    """Return (planning, applying, counting) times in microseconds of decode-only steps with `num_rows` requests.

    `num_waiting` more wait behind them, with prompts of 2,000 tokens.
    """
    limits = CoreLimits(
        max_num_queued_reqs=1 << 20, max_num_queued_tokens=1 << 40, ttft_budget_s=1e9, itl_budget_s=10.0
    )
    later: list[Callable[[], None]] = []
    core, observer = Core(limits), ServingObserver(Meter(COUNTED), later.append)
    attached = ExecutorAttached(describe(num_rows, num_steps), Snapshot())
    observer.saw(attached, 0.0, core.apply(attached, 0.0))
    for handle in range(num_rows):
        # Prompts of different lengths, so that about as many rows begin a new block in every step.
        core.apply(Submit((request(handle, _PROMPT_TOKENS + handle % 16),)), now=0.0)
    # A row is free, but those that run are expected to fill the pool: every plan weighs the head of the line anew.
    core.views.executor(_ADDRESS).output_lengths.mean = 1e9
    for handle in range(num_rows, num_rows + num_waiting):
        core.apply(Submit((request(handle, _WAITING_PROMPT_TOKENS),)), now=0.0)
    times = []
    num_measured, now = 0, 0.0
    while num_measured < num_steps:
        start = time.thread_time_ns()
        plan = core.plan(_ADDRESS, 0.0)
        planned = time.thread_time_ns()
        assert plan is not None, "requests without an end are always planned"
        result = answer(plan, core.views.executor(_ADDRESS))
        received = time.thread_time_ns()
        finished = StepFinished(_ADDRESS, result)
        effects = core.apply(finished, now)
        applied = time.thread_time_ns()
        observer.saw(finished, now, effects)
        observer.planned(_ADDRESS, now, plan, planned - start)
        counted = time.thread_time_ns()
        now += 0.01
        while later:
            later.pop()()
        if len(plan.rows) == num_rows and plan.num_tokens == num_rows:
            times.append(((planned - start) / 1e3, (applied - received) / 1e3, (counted - applied) / 1e3))
            num_measured += 1
    return times


def main() -> None:
    """Print medians and the 99th percentile."""
    parser = argparse.ArgumentParser(description="Measure what planning a decode-only step costs the scheduler.")
    parser.add_argument("--num-rows", type=int, default=256, help="running requests (default 256)")
    parser.add_argument("--num-steps", type=int, default=2000, help="steps to measure (default 2000)")
    parser.add_argument("--num-waiting", type=int, default=0, help="requests of 2,000 tokens that wait (default 0)")
    arguments = parser.parse_args()
    times = measure(arguments.num_rows, arguments.num_steps, arguments.num_waiting)
    totals = sorted(map(sum, times))
    plan_us, apply_us, count_us = map(statistics.median, zip(*times, strict=True))
    print(
        f"{arguments.num_rows} rows: {statistics.median(totals):.0f} us per step (plan {plan_us:.0f}, "
        f"apply {apply_us:.0f}, count {count_us:.0f}), p99 {totals[int(len(totals) * 0.99)]:.0f} us"
    )
    if arguments.num_waiting:
        plans = sorted(plan for plan, *_ in times)
        memory_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"{arguments.num_waiting} requests wait: plan p99 {plans[int(len(plans) * 0.99)]:.0f} us, "
            f"peak memory {memory_mib:.0f} MiB"
        )


def describe(num_rows: int, num_steps: int) -> ExecutorDescription:
    max_model_len = max(_PROMPT_TOKENS + num_steps + 80, 2 * _WAITING_PROMPT_TOKENS)
    return ExecutorDescription(
        address=_ADDRESS,
        incarnation=1,
        epoch=1,
        model="none",
        num_blocks=num_rows * (max_model_len // 16 + 2),
        block_size=16,
        max_num_rows=num_rows + 1,
        max_num_batched_tokens=8192,
        max_model_len=max_model_len,
        max_plans_in_flight=2,
        tag_key=bytes(32),
        vocab_size=32_000,
        step_points=(StepPoint(1, 1_000_000), StepPoint(8192, 20_000_000)),
    )


def request(handle: int, num_prompt_tokens: int) -> Request:
    prompt = (np.arange(num_prompt_tokens, dtype=np.int32) + handle * 131) % 32000
    sampling = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
    return Request(handle, RecordId("", f"request-{handle}"), "none", prompt, sampling, end_token_ids=())


def answer(plan: BatchPlan, executor: Attachment) -> StepResult:
    """Return one token for every row that has computed all it knew, and no end."""
    rows = executor.ledger.rows
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

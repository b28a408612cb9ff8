"""Requests that arrive whether or not others are done: `python -m scheduler_cost.open_loop`.

Runs the core against executors without a model in virtual time: first at its capacity, then at multiples of it, and
prints for each how many requests were answered in time. `--trace FILE` takes arrivals and lengths from a CSV file with
the columns TIMESTAMP, ContextTokens and GeneratedTokens.
"""

import argparse
import csv
import heapq
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median

import numpy as np

from both_sides.executor import InlineExecutor, load_plain
from paceline.plan.values import RecordId, SamplingParams, StepResult
from paceline_executor.limits import RowLimits
from paceline_executor.runner.step_times import StepTimes
from paceline_scheduler.core.core import Core
from paceline_scheduler.core.events import Event, ExecutorAttached, ReplyT, StepFinished, Submit
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.request import Request
from paceline_scheduler.errors import RequestRefusedError

_VOCAB_SIZE = 32_000


@dataclass(frozen=True, slots=True)
class Capacity:
    """The bounds of an executor, and how long its steps take."""

    num_blocks: int
    max_num_rows: int
    max_num_batched_tokens: int
    max_model_len: int
    step_times: StepTimes

    def executor(self, incarnation: int) -> InlineExecutor:
        """Return an executor of this capacity, with blocks of 16 tokens."""
        limits = RowLimits(
            num_rows=self.max_num_rows,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.max_num_batched_tokens,
            num_blocks=self.num_blocks,
            block_size=16,
            vocab_size=_VOCAB_SIZE,
        )
        return InlineExecutor(partial(load_plain, limits, self.step_times), incarnation)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that comes at a time, with a prompt and an output of these lengths in tokens."""

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    tenant: str = ""


@dataclass(slots=True)
class Course:
    """What became of one arrival."""

    arrival: Arrival
    token_s: list[float] = field(default_factory=list)  # when each token came
    was_refused: bool = False
    has_failed: bool = False

    @property
    def first_s(self) -> float:
        """The time from its arrival to its first token."""
        return self.token_s[0] - self.arrival.at_s

    @property
    def between_s(self) -> float:
        """The mean time between its tokens."""
        gaps = len(self.token_s) - 1
        return (self.token_s[-1] - self.token_s[0]) / gaps if gaps else 0.0

    def is_good(self, max_first_s: float, max_between_s: float) -> bool:
        """Tell whether all of it came, and in time."""
        is_whole = len(self.token_s) == self.arrival.num_output_tokens
        return is_whole and self.first_s <= max_first_s and self.between_s <= max_between_s


class OpenLoop:
    """One scheduler's core, its executors and the arrivals, in virtual time."""

    def __init__(self, capacities: Sequence[Capacity], limits: CoreLimits) -> None:
        self.core = Core(limits)
        self.courses: list[Course] = []
        self.planning_s: list[float] = []  # CPU time of each planning
        self.refusing_s: list[float] = []  # CPU time of each refusal
        self.preempted: set[int] = set()  # handles
        self._now_s = 0.0
        self._executors = {f"executor-{i}": capacity.executor(i + 1) for i, capacity in enumerate(capacities)}
        self._running: dict[str, StepResult | None] = dict.fromkeys(self._executors)
        self._events: list[tuple[float, int, str | Arrival]] = []
        self._numbers = count()
        for address, executor in self._executors.items():
            self._feed(ExecutorAttached(*executor.attach(address)))

    def run(self, arrivals: Iterable[Arrival]) -> list[Course]:
        """Let them arrive and run until all have ended; returns what became of each, in order of arrival."""
        for arrival in arrivals:
            self._push(arrival.at_s, arrival)
        while self._events:
            self._now_s, _, event = heapq.heappop(self._events)
            if isinstance(event, Arrival):
                self._arrive(event)
            else:
                result, self._running[event] = self._running[event], None
                assert result is not None, "a step ends once"
                self._feed(StepFinished(event, result))
            for address in self._executors:
                self._drive(address)
        return self.courses

    def _push(self, at_s: float, event: str | Arrival) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), event))

    def _arrive(self, arrival: Arrival) -> None:
        handle = len(self.courses)
        self.courses.append(Course(arrival))
        prompt = (np.arange(arrival.num_prompt_tokens, dtype=np.int32) * 31 + handle * 1009) % 30_000
        request = Request(
            handle=handle,
            key=RecordId(arrival.tenant, f"request-{handle}"),
            model="simulated",
            prompt_token_ids=prompt,
            sampling=SamplingParams(0.0, 0, 1.0, 0.0, handle),
            end_token_ids=(),
            max_tokens=arrival.num_output_tokens,
        )
        start = time.thread_time()
        try:
            self._feed(Submit((request,)))
        except RequestRefusedError:
            self.courses[handle].was_refused = True
            self.refusing_s.append(time.thread_time() - start)

    def _drive(self, address: str) -> None:
        """Send what the core plans, and begin the next step of an executor that has nothing to do."""
        executor = self._executors[address]
        while True:
            start = time.thread_time()
            plan = self.core.plan(address, self._now_s)
            self.planning_s.append(time.thread_time() - start)
            if plan is None:
                break
            rows = self.core.views.executor(address).rows
            self.preempted |= {int(rows.handle[r.row]) for r in plan.releases if r.final is None}
            executor.receive(plan)
        if self._running[address] is None and executor.num_plans_waiting:
            result = self._running[address] = executor.run_next()
            self._push(self._now_s + result.timings.forward_ns / 1e9, address)

    def _feed(self, event: Event[ReplyT]) -> None:
        effects = self.core.apply(event, self._now_s)
        for tokens in effects.tokens:
            for handle, num_tokens in zip(tokens.handles, tokens.num_tokens.tolist(), strict=True):
                self.courses[handle].token_s += [self._now_s] * num_tokens
        for failure in effects.failures:
            self.courses[failure.handle].has_failed = True


def poisson(
    rate: float, seconds: float, chance: random.Random, num_prompt_tokens: int, num_output_tokens: int
) -> list[Arrival]:
    """Return arrivals at a mean rate per second; lengths are exponential around these means, up to four times them."""
    arrivals = []
    at_s = chance.expovariate(rate)
    while at_s < seconds:
        num_prompt, num_output = (
            min(4 * mean, 1 + round(chance.expovariate(1 / mean))) for mean in (num_prompt_tokens, num_output_tokens)
        )
        arrivals.append(Arrival(at_s, num_prompt, num_output))
        at_s += chance.expovariate(rate)
    return arrivals


def read_trace(path: Path, num_requests: int) -> list[Arrival]:
    """Return the first arrivals of a CSV trace, the first of them at 0."""
    with path.open(newline="") as file:
        rows = [row for row, _ in zip(csv.DictReader(file), range(num_requests), strict=False)]
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in rows]
    return [
        Arrival((at - times[0]).total_seconds(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        for at, row in zip(times, rows, strict=True)
    ]


def faster(arrivals: Iterable[Arrival], factor: float) -> list[Arrival]:
    """Return the same arrivals, so many times as fast."""
    return [replace(arrival, at_s=arrival.at_s / factor) for arrival in arrivals]


def main() -> None:
    """Print a table of goodput, refusals, preemptions, and the CPU time of planning and refusing, by load."""
    options = _options()
    arrivals = (
        read_trace(options.trace, options.num_requests)
        if options.trace
        else poisson(1.0, options.num_requests, random.Random(1), 200, 60)  # noqa: S311  # not for secrets
    )
    executor = Capacity(
        num_blocks=options.num_blocks,
        max_num_rows=256,
        max_num_batched_tokens=2048,
        max_model_len=16_384,
        step_times=StepTimes(((1, 5e6), (2048, 210e6))),
    )
    span_s = arrivals[-1].at_s
    capacity = _capacity(executor, arrivals)
    print(f"{len(arrivals)} requests, capacity {capacity:.1f} requests/s, {options.num_blocks} blocks of 16")
    print("  load  in time/s  refused  preempted  plan p99  refusal")
    for load in options.loads:
        limits = CoreLimits(
            ttft_budget_s=options.ttft_budget, itl_budget_s=options.itl_budget, max_num_queued_reqs=1 << 20
        )
        run = OpenLoop([executor], limits)
        courses = run.run(faster(arrivals, load * capacity * span_s / len(arrivals)))
        seconds = max(course.token_s[-1] for course in courses if course.token_s)
        good = sum(course.is_good(options.ttft_budget, options.itl_budget) for course in courses)
        refused = sum(course.was_refused for course in courses) / len(courses)
        planning_ms = sorted(run.planning_s)[int(len(run.planning_s) * 0.99)] * 1e3
        refusal_us = median(run.refusing_s or [0.0]) * 1e6
        preempted = len(run.preempted) / max(1, len(courses) - len(run.refusing_s))
        print(
            f"{load:6.1f} {good / seconds:10.1f} {refused:8.1%} {preempted:10.1%} {planning_ms:6.2f} ms "
            f"{refusal_us:5.0f} us"
        )


def _capacity(executor: Capacity, arrivals: Sequence[Arrival]) -> float:
    """Return the requests per second that are finished when all are there from the beginning."""
    limits = CoreLimits(ttft_budget_s=1e9, max_num_queued_reqs=1 << 20, max_num_queued_tokens=1 << 40)
    courses = OpenLoop([executor], limits).run(replace(arrival, at_s=0.0) for arrival in arrivals)
    return len(courses) / max(course.token_s[-1] for course in courses)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run open-loop load against executors in virtual time.")
    parser.add_argument("--trace", type=Path, help="CSV file of arrivals (default: Poisson arrivals)")
    parser.add_argument("--num-requests", type=int, default=1000, help="arrivals (default 1000)")
    parser.add_argument("--num-blocks", type=int, default=2048, help="KV blocks of 16 tokens (default 2048)")
    parser.add_argument("--ttft-budget", type=float, default=1.0, help="seconds to the first token (default 1)")
    parser.add_argument("--itl-budget", type=float, default=0.05, help="seconds between tokens (default 0.05)")
    parser.add_argument(
        "--loads", type=float, nargs="+", default=[0.5, 0.9, 1.2, 2, 5, 10], help="multiples of the capacity"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()

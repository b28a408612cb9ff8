"""What observing costs a step: `python -m scheduler_cost.observing_cost [--num-rows 256] [--ratio 0.1]`.

Full batches whose requests end after 256 tokens and are replaced, in one process without network and edge. Steps that
nobody observes take turns with steps that are counted, traced and recorded, each alone and all together, so that all
meet the same load. Prints how much later the next plan is ready, counted from a result; and CPU time per step: of the
observers' calls in the loop, and of their threads, which work while the executor computes. The receiver of the spans is
a process of its own.
"""

import argparse
import asyncio
import itertools
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np

from paceline.plan.values import BatchPlan, FinishReason, RecordId, RowFinish, SamplingParams, StepResult, StepTimings
from paceline.process.metrics import Meter
from paceline_scheduler.api.outbox import Finish
from paceline_scheduler.api.request_spans import RequestSpan, RequestSpans
from paceline_scheduler.core.core import Core
from paceline_scheduler.core.events import Effects, Event, ExecutorAttached, StepFinished, Submit
from paceline_scheduler.core.executors import Snapshot
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.request import Request
from paceline_scheduler.observers.definitions import COUNTED
from paceline_scheduler.observers.serving import ServingObserver
from paceline_scheduler.observers.traces import TraceObserver
from paceline_scheduler.recording.recorder import Recorder
from paceline_scheduler.runtime import PlanObserver
from paceline_scheduler.spans.sampler import trace_sampler
from paceline_scheduler.testing.measured_processes import event, module_process
from paceline_scheduler.tracing import LateSpans
from process_groups import end_with_what_was_started
from scheduler_cost import wire
from scheduler_cost.planning_cost import answer, describe

OBSERVED: Mapping[str, tuple[str, ...]] = {
    "nobody": (),
    "metrics": ("metrics",),
    "metrics and traces": ("metrics", "traces"),
    "raw recording": ("raw",),
    "recording": ("stand-ins",),
    "all, raw recording": ("metrics", "traces", "raw"),
    "all": ("metrics", "traces", "stand-ins"),
}
_ADDRESS = "here"
_PROMPT_TOKENS, _OUTPUT_TOKENS = 64, 256
_STEP_NS = 10_000_000
_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(slots=True)
class Cost:
    """Microseconds per step: from a result to the next plan by the clock, one for each step; CPU time of observing in
    the loop, one for each turn; CPU time of the observers' threads over all turns.
    """

    planned_us: list[float] = field(default_factory=list)
    observing_us: list[float] = field(default_factory=list)
    threads_us: float = 0.0


class _Steps:
    """A core that runs full batches for ever, and those who look on."""

    def __init__(self, num_rows: int, observers: tuple[str, ...], folder: Path) -> None:
        limits = CoreLimits(max_num_queued_reqs=1 << 20, max_num_queued_tokens=1 << 40, ttft_budget_s=1e9)
        self._core = Core(replace(limits, max_plans_in_flight=1, run_ahead_s=0.0))
        self._numbers = itertools.count()
        self._meter = Meter(COUNTED)
        self._observers: list[PlanObserver] = []
        self._open: dict[RecordId, RequestSpan] = {}
        self._observing_ns = 0
        before = set(threading.enumerate())
        self.export: LateSpans | None = None
        self._recorder: Recorder | None = None
        if "metrics" in observers:
            self._observers.append(ServingObserver(self._meter))
        if "traces" in observers:
            self.export = LateSpans(trace_sampler(os.environ), time.monotonic, "measured")
            self.export.load()
            self._spans = RequestSpans(self.export, time.monotonic, lambda _: "", str)
            self._observers.append(TraceObserver(self._core.views, self.export))
        if "raw" in observers or "stand-ins" in observers:
            self._recorder = Recorder(lambda: self._core.state, folder, "measured")
            self._recorder.start("-".join(observers), is_raw="raw" in observers)
            self._observers.append(self._recorder)
        clocks = [time.pthread_getcpuclockid(thread.ident or 0) for thread in set(threading.enumerate()) - before]
        self.threads_ns: Callable[[], int] = lambda: sum(map(time.clock_gettime_ns, clocks))
        self._feed(ExecutorAttached(describe(num_rows, 2 * _OUTPUT_TOKENS), Snapshot()))
        for _ in range(num_rows):
            self._submit()
        self._plan = self._planned()

    def run(self, num_steps: int, step_s: float) -> tuple[list[float], float]:
        """Return microseconds from each result to the next plan, and of CPU per step for observing here. Ends with a
        scrape. step_s: how long the executor computes.
        """
        self._observing_ns, planned_us = 0, []
        for _ in range(num_steps):
            result = StepFinished(_ADDRESS, self._result(self._plan))
            begun_ns = time.perf_counter_ns()
            self._step(result)
            planned_us.append((time.perf_counter_ns() - begun_ns) / 1e3)
            time.sleep(step_s)
        self._observing(self._meter.read)
        return planned_us, self._observing_ns / num_steps / 1e3

    def close(self) -> None:
        """Let the threads end."""
        if self.export is not None:
            self.export.close(1.0)
        if self._recorder is not None:
            self._recorder.close()

    def _step(self, result: StepFinished) -> None:
        ended = self._feed(result)
        for key in ended:
            if key in self._open:
                self._observing(self._end, self._open.pop(key))
            self._submit()
        self._plan = self._planned()

    def _planned(self) -> BatchPlan:
        """Plan until there is nothing to plan, as a runtime does."""
        found: list[BatchPlan] = []
        while True:
            now = time.monotonic()
            plan = self._core.plan(_ADDRESS, now)
            self._observing(self._show_plan, now, plan)
            if plan is None:
                return found[0]
            found.append(plan)

    def _show(self, what: Event[Any], now: float, effects: Effects[Any]) -> None:
        for observer in self._observers:
            observer.saw(what, now, effects)

    def _show_plan(self, now: float, plan: BatchPlan | None) -> None:
        for observer in self._observers:
            observer.planned(_ADDRESS, now, plan, 100_000)

    def _end(self, span: RequestSpan) -> None:
        span.finished(Finish(FinishReason.LENGTH, None, None, _PROMPT_TOKENS, 0, _OUTPUT_TOKENS))
        span.end()

    def _submit(self) -> None:
        number = next(self._numbers)
        key = RecordId("", f"request-{number}")
        message = wire.generate_request(key.request_id, _OUTPUT_TOKENS)
        if self.export is not None:
            self._open[key] = span = self._observing(self._spans.begin, message, key, time.monotonic())
            self._observing(span.prepared, "none", _PROMPT_TOKENS)
        request = Request(
            handle=number,
            key=key,
            model="none",
            prompt_token_ids=(np.arange(_PROMPT_TOKENS, dtype=np.int32) + number * 131) % 32000,
            sampling=SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0),
            end_token_ids=(),
            max_tokens=_OUTPUT_TOKENS + number % 64,
            trace_parent=message.trace_parent,
            origin=message.SerializeToString(),
        )
        self._feed(Submit((request,)))

    def _feed(self, what: Event[Any]) -> list[RecordId]:
        now = time.monotonic()
        effects = self._core.apply(what, now)
        self._observing(self._show, what, now, effects)
        return [ended.request.key for ended in effects.ended]

    def _observing(self, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        begun_ns = time.thread_time_ns()
        told = call(*args, **kwargs)
        self._observing_ns += time.thread_time_ns() - begun_ns
        return told

    def _result(self, plan: BatchPlan) -> StepResult:
        """Who has all of its tokens ends."""
        executor = self._core.views.executor(_ADDRESS)
        rows, result = executor.rows, answer(plan, executor)
        for place, row in enumerate(plan.rows.tolist()):
            live, is_reached = rows.live[row], result.num_accepted[place]
            if live is not None and is_reached and rows.num_output(row) + 1 >= (live.request.max_tokens or 0):
                result.finishes[place] = int(RowFinish.LENGTH)
        timings = StepTimings(forward_ns=_STEP_NS, sample_ns=_STEP_NS // 10, waited_ns=_STEP_NS)
        return replace(result, timings=timings)


async def measure(
    ratio: float, num_rows: int, num_steps: int, num_turns: int, step_s: float
) -> tuple[dict[str, Cost], dict[str, int]]:
    """Return what each of OBSERVED costs, and what became of the spans where all is observed."""
    with tempfile.TemporaryDirectory() as folder:
        async with module_process("scheduler_cost.receiver") as receiver:
            with _traces_to((await event(receiver, "ready"))["port"], ratio):
                systems = {name: _Steps(num_rows, observers, Path(folder)) for name, observers in OBSERVED.items()}
            costs = {name: Cost() for name in systems}
            for steps in systems.values():
                steps.run(2 * _OUTPUT_TOKENS, 0.0)  # until requests end and begin all the time
            before_ns = {name: steps.threads_ns() for name, steps in systems.items()}
            for _ in range(num_turns):
                for name, steps in systems.items():
                    planned_us, observing_us = steps.run(num_steps, step_s)
                    costs[name].planned_us.extend(planned_us)
                    costs[name].observing_us.append(observing_us)
            for name, steps in systems.items():
                costs[name].threads_us = (steps.threads_ns() - before_ns[name]) / num_turns / num_steps / 1e3
                steps.close()
            export = systems["all"].export
            return costs, {} if export is None else export.counts()


@contextmanager
def _traces_to(port: int, ratio: float) -> Iterator[None]:
    """Let what is started inside of the block send this share of its requests."""
    variables = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": str(ratio),
    }
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def main() -> None:
    """Print a line for each of OBSERVED."""
    parser = argparse.ArgumentParser(description="Measure what metrics, traces and recordings cost the scheduler.")
    parser.add_argument("--ratio", type=float, default=0.1, help="share of the requests that has spans (default 0.1)")
    parser.add_argument("--num-rows", type=int, default=256, help="running requests (default 256)")
    parser.add_argument("--num-steps", type=int, default=100, help="steps of a turn (default 100)")
    parser.add_argument("--num-turns", type=int, default=12, help="turns of each (default 12)")
    parser.add_argument("--step-ms", type=float, default=8.0, help="how long a step computes (default 8)")
    options = parser.parse_args()
    costs, spans = asyncio.run(
        measure(options.ratio, options.num_rows, options.num_steps, options.num_turns, options.step_ms / 1e3)
    )
    alone_us = costs["nobody"].planned_us
    median_us = statistics.median(alone_us)
    print(f"{options.num_rows} rows, ratio {options.ratio}, spans {spans}; unobserved, a plan takes {median_us:.0f} us")
    for name, cost in costs.items():
        # All run the same requests, so that a step is the same step in each.
        later_us = statistics.median(np.subtract(cost.planned_us, alone_us))
        observing_us = statistics.median(cost.observing_us)
        if OBSERVED[name]:
            print(
                f"{name}: plans {later_us:+.0f} us; CPU {observing_us:.0f} us per step in the loop, "
                f"{cost.threads_us:.0f} in threads"
            )


if __name__ == "__main__":
    end_with_what_was_started()
    main()

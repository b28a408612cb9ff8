"""What metrics and traces cost: `python -m scheduler_cost.tracing_cost [--ratio 0.1] [--num-rows 256]`.

First CPU time: that of all calls that count and trace, and of the thread that sends, in steps of a full batch whose
requests end after 256 tokens and are replaced, without network and edge. Then throughput: closed-loop clients of a
scheduler process that sends traces, and of one that does not, in turn. The receiver is a process of its own.
"""

import argparse
import asyncio
import itertools
import os
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from paceline.plan.values import BatchPlan, FinishReason, RecordId, RowFinish, SamplingParams, StepResult, StepTimings
from paceline.process.metrics import Meter
from paceline_client import AsyncClient, Stopping
from paceline_scheduler.api.outbox import Finish
from paceline_scheduler.api.request_spans import RequestSpan, RequestSpans
from paceline_scheduler.core.core import Core
from paceline_scheduler.core.events import Event, ExecutorAttached, StepFinished, Submit
from paceline_scheduler.core.executors import Snapshot
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.request import Request
from paceline_scheduler.observers.definitions import COUNTED
from paceline_scheduler.observers.serving import ServingObserver
from paceline_scheduler.observers.traces import TraceObserver
from paceline_scheduler.runtime import PlanObserver
from paceline_scheduler.span_export import SpanExport
from paceline_scheduler.testing.measured_processes import event, module_process, scheduler_of, simulated_executor
from scheduler_cost import wire
from scheduler_cost.planning_cost import describe

_ADDRESS = "here"
_PROMPT_TOKENS, _OUTPUT_TOKENS = 64, 256
_SHORT_OUTPUT_TOKENS = 64
_NUM_TURNS, _NUM_SHORT_TURNS = 6, 30
_STEP_NS = 10_000_000


class _Steps:
    """A core that runs full batches for ever, with metrics and traces."""

    def __init__(self, num_rows: int, export: SpanExport) -> None:
        limits = CoreLimits(max_num_queued_reqs=1 << 20, max_num_queued_tokens=1 << 40, ttft_budget_s=1e9)
        self._core = Core(limits)
        self._numbers = itertools.count()
        self._spans = RequestSpans(export, time.monotonic, lambda _: "", str)
        self._observers: tuple[PlanObserver, ...] = (
            ServingObserver(Meter(COUNTED)),
            TraceObserver(self._core.views, export),
        )
        self._open: dict[RecordId, RequestSpan] = {}
        self._observing_ns = 0
        self._feed(ExecutorAttached(describe(num_rows, 2 * _OUTPUT_TOKENS), Snapshot()))
        for _ in range(num_rows):
            self._submit()

    def run(self, num_steps: int) -> tuple[float, float, float]:
        """Return CPU times per step in microseconds: of observing here, of sending elsewhere, and of all the rest."""
        process_ns, here_ns, self._observing_ns = time.process_time_ns(), time.thread_time_ns(), 0
        for _ in range(num_steps):
            self._step()
        here_ns = time.thread_time_ns() - here_ns
        elsewhere_ns = time.process_time_ns() - process_ns - here_ns
        times_ns = self._observing_ns, elsewhere_ns, here_ns - self._observing_ns
        observing, sending, rest = (ns / num_steps / 1e3 for ns in times_ns)
        return observing, sending, rest

    def _step(self) -> None:
        now = time.monotonic()
        plan = self._core.plan(_ADDRESS, now)
        if plan is None:
            raise RuntimeError("nothing was planned for a full batch")
        begun_ns = time.thread_time_ns()
        for observer in self._observers:
            observer.planned(_ADDRESS, now, plan, 100_000)
        self._observing_ns += time.thread_time_ns() - begun_ns
        ended = self._feed(StepFinished(_ADDRESS, self._result(plan)))
        for key in ended:
            span, begun_ns = self._open.pop(key), time.thread_time_ns()
            span.finished(Finish(FinishReason.LENGTH, None, None, _PROMPT_TOKENS, 0, _OUTPUT_TOKENS))
            span.end()
            self._observing_ns += time.thread_time_ns() - begun_ns
            self._submit()

    def _submit(self) -> None:
        number = next(self._numbers)
        key = RecordId("", f"request-{number}")
        message = wire.generate_request(key.request_id, _OUTPUT_TOKENS)
        begun_ns = time.thread_time_ns()
        span = self._open[key] = self._spans.begin(message, key, time.monotonic())
        span.prepared("none", _PROMPT_TOKENS)
        self._observing_ns += time.thread_time_ns() - begun_ns
        prompt = (np.arange(_PROMPT_TOKENS, dtype=np.int32) + number * 131) % 32000
        sampling = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
        request = Request(number, key, "none", prompt, sampling, (), max_tokens=_OUTPUT_TOKENS + number % 64)
        self._feed(Submit((replace(request, trace_parent=message.trace_parent),)))

    def _feed(self, what: Event[Any]) -> list[RecordId]:
        now = time.monotonic()
        effects = self._core.apply(what, now)
        begun_ns = time.thread_time_ns()
        for observer in self._observers:
            observer.saw(what, now, effects)
        self._observing_ns += time.thread_time_ns() - begun_ns
        return [ended.request.key for ended in effects.ended]

    def _result(self, plan: BatchPlan) -> StepResult:
        """Answer with one token for every row that has computed all it knew; who has all of its tokens ends."""
        executor = self._core.views.executor(_ADDRESS)
        rows = executor.rows
        reached = (rows.num_scheduled[plan.rows] >= rows.target[plan.rows]).astype(np.int32)
        finishes = np.zeros(len(plan.rows), dtype=np.uint8)
        for place, row in enumerate(plan.rows.tolist()):
            live = rows.live[row]
            if live is not None and reached[place] and rows.num_output(row) + 1 >= (live.request.max_tokens or 0):
                finishes[place] = int(RowFinish.LENGTH)
        return StepResult(
            incarnation=1,
            epoch=1,
            step_id=plan.step_id,
            rows=plan.rows,
            num_accepted=reached,
            token_ids=np.full(int(reached.sum()), plan.step_id % 32000, dtype=np.int32),
            finishes=finishes,
            grant_hash=executor.in_flight[0].grant_hash,
            timings=StepTimings(forward_ns=_STEP_NS, sample_ns=_STEP_NS // 10, waited_ns=_STEP_NS),
        )


async def cpu_cost(ratio: float, num_rows: int, num_steps: int) -> list[tuple[float, float, float]]:
    """Return CPU times per step as `_Steps.run` does, of each turn."""
    async with module_process("scheduler_cost.receiver") as receiver:
        with _traces_to((await event(receiver, "ready"))["port"], ratio):
            export = SpanExport(time.monotonic, "measured")
            steps = _Steps(num_rows, export)
            steps.run(2 * _OUTPUT_TOKENS)  # until requests end and begin all the time
            turns = [steps.run(num_steps) for _ in range(_NUM_SHORT_TURNS)]
            export.close(1.0)
    print(f"spans: {export.counts()}")
    return turns


async def throughput(ratio: float, num_streams: int, step_ms: float, seconds: float) -> list[tuple[float, float]]:
    """Return tokens per second without and with traces, of each turn."""
    async with AsyncExitStack() as stack:
        receiver = await stack.enter_async_context(module_process("scheduler_cost.receiver"))
        port = (await event(receiver, "ready"))["port"]
        plain = await stack.enter_async_context(_system(step_ms))
        with _traces_to(port, ratio):
            traced = await stack.enter_async_context(_system(step_ms))
        for client in (plain, traced):
            await _tokens_per_s(client, num_streams, 1.0)
        return [
            (await _tokens_per_s(plain, num_streams, seconds), await _tokens_per_s(traced, num_streams, seconds))
            for _ in range(_NUM_TURNS)
        ]


@asynccontextmanager
async def _system(step_ms: float) -> AsyncIterator[AsyncClient]:
    async with (
        simulated_executor(step_ms=step_ms) as address,
        scheduler_of(address) as (_, ready),
        AsyncClient(f"127.0.0.1:{ready['port']}") as client,
    ):
        yield client


async def _tokens_per_s(client: AsyncClient, num_streams: int, seconds: float) -> float:
    num_tokens, begun_s = 0, time.monotonic()

    async def ask(number: int) -> None:
        nonlocal num_tokens
        while time.monotonic() < begun_s + seconds:
            number += num_streams
            stream = client.stream(
                token_ids=[number % 251, *range(_PROMPT_TOKENS - 1)], stopping=Stopping(max_tokens=_SHORT_OUTPUT_TOKENS)
            )
            async for delta in stream:
                num_tokens += len(delta.token_ids)

    await asyncio.gather(*map(ask, range(num_streams)))
    return num_tokens / (time.monotonic() - begun_s)


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
    """Print medians of the turns."""
    parser = argparse.ArgumentParser(description="Measure what metrics and traces cost the scheduler.")
    parser.add_argument("--ratio", type=float, default=0.1, help="share of the requests that has spans (default 0.1)")
    parser.add_argument("--num-rows", type=int, default=256, help="running requests of the first part (default 256)")
    parser.add_argument("--num-steps", type=int, default=200, help="steps of a turn (default 200)")
    parser.add_argument("--num-streams", type=int, default=32, help="clients of the second part (default 32)")
    parser.add_argument("--step-ms", type=float, default=10.0, help="steps of the second part (default 10)")
    parser.add_argument("--seconds", type=float, default=5.0, help="a turn of the second part (default 5)")
    options = parser.parse_args()
    turns = asyncio.run(cpu_cost(options.ratio, options.num_rows, options.num_steps))
    observing, sending, rest = map(statistics.median, zip(*turns, strict=True))
    least = min(turn[0] + turn[1] for turn in turns)
    print(
        f"{options.num_rows} rows, ratio {options.ratio}: {observing + sending:.0f} us per step for metrics and traces "
        f"({observing:.0f} in the loop, {sending:.0f} sending, least {least:.0f}), "
        f"{(observing + sending) / rest:.1%} of the rest, {rest:.0f} us"
    )
    rates = asyncio.run(throughput(options.ratio, options.num_streams, options.step_ms, options.seconds))
    plain, traced = map(statistics.median, zip(*rates, strict=True))
    change = statistics.median(with_it / without_it for without_it, with_it in rates)
    print(
        f"{options.num_streams} streams, steps of {options.step_ms} ms: {plain:.0f} tokens/s without, "
        f"{traced:.0f} with traces, ratio {change:.3f}"
    )


if __name__ == "__main__":
    main()

"""What streaming costs: `python -m scheduler_cost.edge_cost [--num-streams 1 32 256] [--call generate]`.

Starts a scheduler, a simulated executor with steps of a fixed time, and a client, each as a process of its own, over
real sockets, and prints the CPU time (all threads) that scheduler and client spend on one step and on one row of it
while all streams decode, and how much of the time the executor waited for its next plan. The budget of the scheduler is
10 us per row of a step.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc.aio

from paceline_scheduler.observers.steps import StepTotals
from paceline_scheduler.testing.measured_processes import (
    NO_BUDGETS,
    cpu_ns,
    module_process,
    next_line,
    room_for,
    scheduler_of,
    simulated_executor,
)
from scheduler_cost import wire

_TOKENS_BEFORE = 16  # that every stream has got when measuring begins


@dataclass(frozen=True, slots=True)
class EdgeCost:
    """CPU times in microseconds per step of the executor; `starved_us` is how long it then waited for its plan."""

    num_steps: int
    num_rows_per_step: float
    num_tokens_per_delta: float
    step_us: float
    starved_us: float
    scheduler_us: float
    client_us: float


@dataclass(frozen=True, slots=True)
class _Sample:
    """All processes at one moment, times in nanoseconds."""

    at_ns: int
    scheduler_ns: int
    client_ns: int
    num_tokens: int
    num_deltas: int
    steps: StepTotals


async def measure(num_streams: int, step_ms: float, call: str, seconds: float) -> EdgeCost:
    """Return what steps of `step_ms` with this many streams cost; `call` is "session" or "generate"."""
    async with (
        simulated_executor(*room_for(num_streams), step_ms=step_ms) as address,
        scheduler_of(address, *NO_BUDGETS) as (scheduler, ready),
    ):
        load_options = (f"127.0.0.1:{ready['port']}", "--num-streams", str(num_streams), "--call", call)
        async with (
            module_process("paceline_client.testing.stream_load", *load_options) as client,
            grpc.aio.insecure_channel(f"127.0.0.1:{ready['admin_port']}") as admin,
        ):
            first = await _sample_when(
                lambda report, _: report["num_tokens"] >= _TOKENS_BEFORE * num_streams, client, scheduler, admin
            )
            last = await _sample_when(lambda _, at_ns: at_ns >= first.at_ns + seconds * 1e9, client, scheduler, admin)
    return _cost(first, last)


def main() -> None:
    """Print a line for each number of streams."""
    parser = argparse.ArgumentParser(description="Measure what streaming costs scheduler and client.")
    parser.add_argument("--num-streams", type=int, nargs="+", default=[1, 32, 256], help="default 1 32 256")
    parser.add_argument("--step-ms", type=float, nargs="+", default=[4.0, 25.0, 50.0], help="default 4 25 50")
    parser.add_argument("--call", choices=("session", "generate"), default="session", help="default session")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long to measure (default 5)")
    options = parser.parse_args()
    for num_streams, step_ms in zip(options.num_streams, options.step_ms, strict=True):
        cost = asyncio.run(measure(num_streams, step_ms, options.call, options.seconds))
        num_rows = cost.num_rows_per_step
        print(
            f"{num_streams} streams, {cost.num_steps} steps of {cost.step_us / 1e3:.1f} ms, {num_rows:.1f} rows: "
            f"scheduler {cost.scheduler_us:.0f} us per step, {cost.scheduler_us / num_rows:.1f} per row; "
            f"client {cost.client_us:.0f} us per step, {cost.client_us / num_rows:.1f} per row; "
            f"{cost.num_tokens_per_delta:.2f} tokens per delta; executor starved {cost.starved_us / cost.step_us:.1%}",
            flush=True,
        )


def _cost(first: _Sample, last: _Sample) -> EdgeCost:
    num_steps = last.steps.num_steps - first.steps.num_steps

    def per_step_us(begin_ns: int, end_ns: int) -> float:
        return (end_ns - begin_ns) / num_steps / 1e3

    return EdgeCost(
        num_steps=num_steps,
        num_rows_per_step=(last.steps.num_rows - first.steps.num_rows) / num_steps,
        num_tokens_per_delta=(last.num_tokens - first.num_tokens) / (last.num_deltas - first.num_deltas),
        step_us=per_step_us(first.at_ns, last.at_ns),
        starved_us=per_step_us(first.steps.starved_ns, last.steps.starved_ns),
        scheduler_us=per_step_us(first.scheduler_ns, last.scheduler_ns),
        client_us=per_step_us(first.client_ns, last.client_ns),
    )


async def _sample_when(
    is_due: Callable[[dict[str, int], int], bool],
    client: asyncio.subprocess.Process,
    scheduler: asyncio.subprocess.Process,
    admin: grpc.aio.Channel,
) -> _Sample:
    """Look at all processes as soon as the client's report, and the time in nanoseconds, are what is waited for."""
    while not is_due(report := json.loads(await next_line(client)), at_ns := time.monotonic_ns()):
        pass
    scheduler_ns = cpu_ns(scheduler)
    ask: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = admin.unary_unary(wire.LIST_EXECUTORS_METHOD)
    steps = wire.read_step_totals(await ask(b""))
    return _Sample(at_ns, scheduler_ns, report["cpu_ns"], report["num_tokens"], report["num_deltas"], steps)


if __name__ == "__main__":
    main()

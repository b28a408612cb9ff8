"""What a refusal costs: `python -m scheduler_cost.refusal_cost [--num-chars 100 10000 100000]`.

Starts a scheduler and a simulated executor, each as a process of its own, and prints the CPU time (all threads) that
the scheduler spends on a Generate call that it refuses because the queue has no room, for prompts of these lengths. The
queue holds one request, and two completions are asked for, so it never has. The budget is 1 ms: a client that is turned
away must cost much less than one that is served.
"""

import argparse
import asyncio
from dataclasses import dataclass

import grpc
import grpc.aio

from paceline_scheduler.testing.measured_processes import cpu_ns, scheduler_of, simulated_executor
from scheduler_cost import wire

_NUM_WARM_UPS = 20


@dataclass(frozen=True, slots=True)
class RefusalCost:
    """The scheduler's CPU time per refusal in microseconds."""

    num_refusals: int
    scheduler_us: float


async def measure(num_chars: int, num_refusals: int) -> RefusalCost:
    """Return what it costs to refuse prompts of so many characters."""
    async with (
        simulated_executor() as address,
        scheduler_of(address, "--max-num-queued-reqs", "1") as (scheduler, ready),
        grpc.aio.insecure_channel(f"127.0.0.1:{ready['port']}") as channel,
    ):
        generate: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(wire.GENERATE_METHOD)
        request = wire.write_generate("x" * num_chars, 2)
        before_ns = 0
        for number in range(_NUM_WARM_UPS + num_refusals):
            if number == _NUM_WARM_UPS:
                before_ns = cpu_ns(scheduler)
            code = await generate(request).code()
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED, f"refused with {code}"
        return RefusalCost(num_refusals, (cpu_ns(scheduler) - before_ns) / num_refusals / 1e3)


def main() -> None:
    """Print a line for each length."""
    parser = argparse.ArgumentParser(description="Measure what a refused request costs the scheduler.")
    parser.add_argument("--num-chars", type=int, nargs="+", default=[100, 10_000, 100_000], help="lengths of prompts")
    parser.add_argument("--num-refusals", type=int, default=1000, help="how many to measure (default 1000)")
    options = parser.parse_args()
    for num_chars in options.num_chars:
        cost = asyncio.run(measure(num_chars, options.num_refusals))
        print(f"{num_chars} characters: {cost.scheduler_us:.0f} us of CPU time per refusal", flush=True)


if __name__ == "__main__":
    main()

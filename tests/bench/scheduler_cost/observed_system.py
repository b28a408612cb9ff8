"""What observing costs a system: `python -m scheduler_cost.observed_system [--num-streams 32] [--ratio 0.1]`.

A scheduler process that sends traces and records, and one that does neither, in turn: first the CPU time and the time
until each listens, then tokens of closed-loop clients per second and per second of the scheduler's CPU. Metrics are
counted by both. Executors are simulated; the receiver of the spans is a process of its own.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from paceline_client import AsyncClient, Stopping
from paceline_scheduler.testing.measured_processes import (
    cpu_ns,
    event,
    module_process,
    scheduler_of,
    simulated_executor,
)
from scheduler_cost.observing_cost import traces_to

_PROMPT_TOKENS, _OUTPUT_TOKENS = 64, 64
_NUM_TURNS = 6


@dataclass(frozen=True, slots=True)
class _System:
    client: AsyncClient
    cpu_ns: Callable[[], int]


@asynccontextmanager
async def _running(step_ms: float, *options: str) -> AsyncIterator[_System]:
    async with (
        simulated_executor(step_ms=step_ms) as address,
        scheduler_of(address, *options) as (process, ready),
        AsyncClient(f"127.0.0.1:{ready['port']}") as client,
    ):
        yield _System(client, lambda: cpu_ns(process))


async def _load(system: _System, num_streams: int, seconds: float) -> tuple[float, float]:
    """Return tokens per second, and per second of CPU."""
    num_tokens, begun_s, begun_ns = 0, time.monotonic(), system.cpu_ns()

    async def ask(number: int) -> None:
        nonlocal num_tokens
        while time.monotonic() < begun_s + seconds:
            number += num_streams
            stream = system.client.stream(
                token_ids=[number % 251, *range(_PROMPT_TOKENS - 1)], stopping=Stopping(max_tokens=_OUTPUT_TOKENS)
            )
            async for delta in stream:
                num_tokens += len(delta.token_ids)

    await asyncio.gather(*map(ask, range(num_streams)))
    spent_ns = system.cpu_ns() - begun_ns
    return num_tokens / (time.monotonic() - begun_s), num_tokens / (spent_ns / 1e9)


async def throughput(port: int, ratio: float, num_streams: int, step_ms: float, seconds: float, *options: str) -> None:
    """Print medians of the turns, and of the ratios of two."""
    async with AsyncExitStack() as stack:
        plain = await stack.enter_async_context(_running(step_ms))
        with traces_to(port, ratio):
            observed = await stack.enter_async_context(_running(step_ms, *options))
        for system in (plain, observed):
            await _load(system, num_streams, 2.0)
        turns = [
            (await _load(plain, num_streams, seconds), await _load(observed, num_streams, seconds))
            for _ in range(_NUM_TURNS)
        ]
    for place, name in enumerate(("tokens per second", "tokens per second of the scheduler's CPU")):
        without, observing = ([turn[place] for turn in kind] for kind in zip(*turns, strict=True))
        ratios = [some / all_ for all_, some in zip(without, observing, strict=True)]
        print(
            f"{num_streams} streams, steps of {step_ms} ms, {name}: {statistics.median(without):.0f} without, "
            f"{statistics.median(observing):.0f} observed, ratio {statistics.median(ratios):.3f}"
        )


async def starts(port: int, num_starts: int, *options: str) -> None:
    """Print medians of CPU time and time until a scheduler listens."""
    found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for number in range(2 * (num_starts + 1)):
        is_observed = bool(number % 2)
        with traces_to(port, 1.0) if is_observed else nullcontext():
            begun_s = time.monotonic()
            nobody = ("--port", "0", "--admin-port", "0", "--health-port", "0", "--executors", "127.0.0.1:1")
            own = options if is_observed else ()
            async with module_process("paceline_scheduler", *nobody, "--metrics-port", "0", *own) as process:
                await event(process, "listening")
                if number > 1:  # the first ones may compile
                    found[is_observed].append((cpu_ns(process) / 1e6, (time.monotonic() - begun_s) * 1e3))
    for place, name in enumerate(("CPU", "time")):
        without, observed = (statistics.median(each[place] for each in found[kind]) for kind in (False, True))
        print(f"until it listens, {name}: {without:.0f} ms without, {observed:.0f} ms observed")


async def main() -> None:
    """Print a line for each figure."""
    parser = argparse.ArgumentParser(description="Measure what traces and recordings cost a running scheduler.")
    parser.add_argument("--ratio", type=float, default=0.1, help="share of the requests that has spans (default 0.1)")
    parser.add_argument("--raw", action="store_true", help="record token ids as they are")
    parser.add_argument("--num-streams", type=int, default=32, help="clients (default 32)")
    parser.add_argument("--step-ms", type=float, default=10.0, help="steps of the executors (default 10)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a turn (default 8)")
    parser.add_argument("--num-starts", type=int, default=15, help="of each kind (default 15)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        async with module_process("scheduler_cost.receiver") as receiver:
            port = (await event(receiver, "ready"))["port"]
            kinds = [
                ("--record-dir", f"{'raw:' if options.raw else ''}{Path(folder) / name}") for name in ("starts", "load")
            ]
            await starts(port, options.num_starts, *kinds[0])
            await throughput(port, options.ratio, options.num_streams, options.step_ms, options.seconds, *kinds[1])


if __name__ == "__main__":
    asyncio.run(main())

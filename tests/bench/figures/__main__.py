"""Measure and print the table of MEASURED.md: `python -m figures` with `tests/bench` on the path, or `make figures`."""

import asyncio
import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count, pairwise
from pathlib import Path
from subprocess import PIPE

import grpc.aio

from figures.system import Addresses, running_system, scheduler_cold_start_s
from paceline.v1.admin_pb2 import ListExecutorsRequest
from paceline.v1.admin_pb2_grpc import AdminServiceStub
from paceline_client import AsyncClient, Sampling, Stopping
from process_groups import end_with_what_was_started, run_program

_NUM_STREAMS = (1, 8, 32)
_PROMPT_TOKENS = 64
_OUTPUT_TOKENS = 32
_LONG_PROMPT_TOKENS = 520
_LONG_OUTPUT_TOKENS = 1500  # long enough that the first still run when the last begins
_NUM_LOADS = 3
_NUM_COLD_STARTS = 5
_BENCH = Path(__file__).resolve().parents[1]
_prompt_numbers = count()


@dataclass(frozen=True, slots=True)
class Load:
    """What clients saw of so many requests at once."""

    num_streams: int
    first_ms: float
    inter_token_ms: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class KvUse:
    """How full the blocks were that requests owned, in the middle of a run."""

    filled_share: float
    mean_context: float


async def main() -> int:
    """Measure one row after another, and print the table. Returns the exit code: 1 if a row could not be measured."""
    print(f"measuring; load average {os.getloadavg()[0]:.1f} before the start", file=sys.stderr)
    cold_starts = [await scheduler_cold_start_s() for _ in range(_NUM_COLD_STARTS)]
    planning = _planning_cost()
    with running_system() as addresses:
        async with AsyncClient(addresses.api) as client:
            await _load(client, 2)  # the first requests meet cold caches
            loads = [await _median_load(client, num_streams) for num_streams in _NUM_STREAMS]
            kv_use = await _kv_use(client, addresses)
    _print_table(loads, kv_use, planning, statistics.median(cold_starts))
    if kv_use is None:
        print(f"not measured: KV slots filled, {max(_NUM_STREAMS)} streams never ran at a time", file=sys.stderr)
    return 0 if kv_use else 1


async def _median_load(client: AsyncClient, num_streams: int) -> Load:
    loads = [await _load(client, num_streams) for _ in range(_NUM_LOADS)]
    return sorted(loads, key=lambda load: load.tokens_per_s)[_NUM_LOADS // 2]


async def _load(client: AsyncClient, num_streams: int) -> Load:
    start = time.perf_counter()
    arrivals = await asyncio.gather(*(_arrivals(client, _PROMPT_TOKENS, _OUTPUT_TOKENS) for _ in range(num_streams)))
    elapsed = time.perf_counter() - start
    print(f"{num_streams} streams: {num_streams * _OUTPUT_TOKENS / elapsed:.1f} tokens/s", file=sys.stderr)
    gaps = [later - earlier for times in arrivals for earlier, later in pairwise(times[1:])]
    return Load(
        num_streams,
        first_ms=statistics.median(times[1] - times[0] for times in arrivals) * 1e3,
        inter_token_ms=statistics.median(gaps) * 1e3,
        tokens_per_s=num_streams * _OUTPUT_TOKENS / elapsed,
    )


async def _arrivals(client: AsyncClient, num_prompt: int, num_output: int) -> list[float]:
    """Send one request of its own; returns when it was sent and when each delta came."""
    times = [time.perf_counter()]
    stream = client.stream(
        token_ids=_prompt(num_prompt),
        sampling=Sampling(temperature=0.0),
        stopping=Stopping(max_tokens=num_output, ignore_eos=True),
    )
    async for delta in stream:
        times += [time.perf_counter()] * len(delta.token_ids)
    return times


def _prompt(num_tokens: int) -> list[int]:
    """Return token ids that no request had before, so that the prefix cache has no part in the figures."""
    number = next(_prompt_numbers)
    return [1000 + (number * 7919 + position * 31) % 40000 for position in range(num_tokens)]


async def _kv_use(client: AsyncClient, addresses: Addresses) -> KvUse | None:
    """Look at the pool while 32 requests of more than 512 tokens decode."""
    num_streams = max(_NUM_STREAMS)
    running = [
        asyncio.create_task(_arrivals(client, _LONG_PROMPT_TOKENS, _LONG_OUTPUT_TOKENS)) for _ in range(num_streams)
    ]
    found = None
    async with grpc.aio.insecure_channel(addresses.admin) as channel:
        admin = AdminServiceStub(channel)
        while not all(task.done() for task in running):
            await asyncio.sleep(0.2)
            executor = (await admin.ListExecutors(ListExecutorsRequest())).executors[0]
            mean_context = executor.num_filled_slots / max(1, executor.num_running_requests)
            if executor.num_running_requests == num_streams and mean_context >= _LONG_PROMPT_TOKENS:
                found = KvUse(executor.num_filled_slots / executor.num_owned_slots, mean_context)
                break
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return found


def _planning_cost() -> str:
    command = [sys.executable, "-m", "scheduler_cost.planning_cost"]
    finished = run_program(command, {**os.environ, "PYTHONPATH": str(_BENCH)}, stdout=PIPE)
    if finished.code != 0:
        raise RuntimeError(f"scheduler_cost.planning_cost ended with code {finished.code}")
    return finished.stdout.strip()


def _print_table(loads: list[Load], kv_use: KvUse | None, planning: str, cold_start_s: float) -> None:
    print(f"{datetime.now(UTC):%Y-%m-%d}, {_machine()}; `make figures`. ", end="")
    print(f"Prompts of {_PROMPT_TOKENS} tokens, {_OUTPUT_TOKENS} out, greedy, client to client over gRPC.\n")
    print("| | 1 stream | 8 streams | 32 streams |\n|---|---|---|---|")
    for name, values in (
        ("time to first token, median", [f"{load.first_ms:.0f} ms" for load in loads]),
        ("time between tokens, median", [f"{load.inter_token_ms:.0f} ms" for load in loads]),
        ("output tokens per second, all streams", [f"{load.tokens_per_s:.0f}" for load in loads]),
    ):
        print(f"| {name} | {' | '.join(values)} |")
    print("\n| | |\n|---|---|")
    if kv_use is not None:
        context = f"{max(_NUM_STREAMS)} streams, mean context {kv_use.mean_context:.0f}"
        print(f"| KV slots filled, of those allocated ({context}) | {kv_use.filled_share:.1%} |")
    print(f"| scheduler's CPU time per decode-only step | {planning} |")
    print(f"| cold start of the scheduler, process start to listening, median | {cold_start_s:.2f} s |")


def _machine() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} cores of {(models or [platform.machine()])[0]}, Python {platform.python_version()}"


if __name__ == "__main__":
    end_with_what_was_started()
    try:
        sys.exit(asyncio.run(main()))
    except RuntimeError as error:
        sys.exit(f"figures: {error}")

"""Time streams that are read beside many that are not: `python -m slow_clients [--num-clients 100] [--seconds 20]`.

Runs a simulated executor, a scheduler, and a crowd of clients as processes of their own; eight streams of the client
library run in this one. The crowd reads everything, a message per second, or nothing, in turn; the table says what the
eight see between two tokens, and how that differs from a crowd that reads.
"""

import argparse
import asyncio
import itertools
import os
import statistics
import sys
import time
from collections.abc import Sequence

from paceline_client import AsyncClient, Stopping
from paceline_scheduler.testing.measured_processes import (
    NO_BUDGETS,
    module_process,
    next_line,
    room_for,
    scheduler_of,
    simulated_executor,
)
from slow_clients.crowd import Reading

_NUM_STREAMS = 8
_STOPPING = Stopping(max_tokens=2000, ignore_eos=True)


async def main() -> None:
    """Print the table."""
    options = _options()
    print(f"load average {os.getloadavg()[0]:.1f} before the start", file=sys.stderr)
    gaps_s: dict[Reading, list[list[float]]] = {reading: [] for reading in Reading}
    for _, reading in itertools.product(range(options.repetitions), Reading):
        gaps_s[reading].append(await gaps_beside(reading, options.num_clients, options.step_ms, options.seconds))
    print(f"\n| {options.num_clients} clients read | p50 | p99 | longest | p99 by that beside who read all |")
    print("|---|---|---|---|---|")
    for reading in Reading:
        ratio = statistics.median(
            _p99(gaps) / _p99(beside_all) for gaps, beside_all in zip(gaps_s[reading], gaps_s[Reading.ALL], strict=True)
        )
        figures = [statistics.median(map(figure, gaps_s[reading])) for figure in (statistics.median, _p99, max)]
        print(f"| {reading} | " + " | ".join(f"{1e3 * figure:.1f} ms" for figure in figures) + f" | {ratio:.2f} |")


async def gaps_beside(reading: Reading, num_clients: int, step_ms: float, seconds: float) -> list[float]:
    """The times between two outputs of the eight streams, in seconds."""
    async with (
        simulated_executor(*room_for(num_clients + _NUM_STREAMS), step_ms=step_ms) as executor,
        scheduler_of(executor, *NO_BUDGETS) as (_, ready),
    ):
        target = f"127.0.0.1:{ready['port']}"
        crowd = ("slow_clients.crowd", target, "--num-clients", str(num_clients), "--reading", reading)
        async with module_process(*crowd) as process, AsyncClient(target) as client:
            await next_line(process)
            times_s = await asyncio.gather(*(_times(client, number, seconds) for number in range(_NUM_STREAMS)))
    return [after - before for of_stream in times_s for before, after in itertools.pairwise(of_stream)]


async def _times(client: AsyncClient, number: int, seconds: float) -> Sequence[float]:
    """When a stream's outputs came, for so many seconds from the first on."""
    times_s: list[float] = []
    while not times_s or times_s[-1] < times_s[0] + seconds:
        async for _ in client.stream(token_ids=[number] * 8, stopping=_STOPPING):
            times_s.append(time.perf_counter())
            if times_s[-1] > times_s[0] + seconds:
                break
    return times_s


def _p99(gaps_s: Sequence[float]) -> float:
    return statistics.quantiles(gaps_s, n=100, method="inclusive")[98]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m slow_clients", description="Time streams beside slow clients.")
    parser.add_argument("--num-clients", type=int, default=100, help="beside the eight streams (default 100)")
    parser.add_argument("--step-ms", type=float, default=50.0, help="of the simulated executor (default 50)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement (default 20)")
    parser.add_argument("--repetitions", type=int, default=5, help="of all three, in turn (default 5)")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main())

"""What a rogue costs honest requests: `python -m scheduler_cost.rogue_cost [--num-streams 16] [--step-ms 5]`.

A scheduler of an honest, simulated executor and of one that lies; a scheduler that lies comes to the honest one
meanwhile. Turns with the rogue and without it follow each other. Prints gaps between tokens of closed-loop clients, and
whether each request got all of its tokens.
"""

import argparse
import asyncio
import socket
import statistics
import time

from paceline_client import AsyncClient, Stopping
from paceline_scheduler.testing.measured_processes import event, module_process, scheduler_of, simulated_executor
from process_groups import end_with_what_was_started

_PROMPT_TOKENS, _OUTPUT_TOKENS = 32, 64
_WARM_UP_S = 2.0


async def load(client: AsyncClient, num_streams: int, seconds: float) -> tuple[list[float], int]:
    """Return milliseconds between deltas, and how many requests did not get all tokens."""
    gaps_ms, num_short, end_s = [], 0, time.monotonic() + seconds

    async def ask(number: int) -> None:
        nonlocal num_short
        while time.monotonic() < end_s:
            number += num_streams
            tokens = [number % 251, *range(_PROMPT_TOKENS - 1)]
            num_tokens, before_s = 0, None
            async for delta in client.stream(token_ids=tokens, stopping=Stopping(max_tokens=_OUTPUT_TOKENS)):
                now_s = time.monotonic()
                if before_s is not None:
                    gaps_ms.append((now_s - before_s) * 1e3)
                num_tokens, before_s = num_tokens + len(delta.token_ids), now_s
            num_short += num_tokens != _OUTPUT_TOKENS

    await asyncio.gather(*map(ask, range(num_streams)))
    return gaps_ms, num_short


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


async def measure(num_streams: int, step_ms: float, seconds: float, num_turns: int) -> dict[str, list[list[float]]]:
    """Return the gaps of each turn, with and without. Raises RuntimeError if a request lost tokens."""
    port = _free_port()
    gaps_ms: dict[str, list[list[float]]] = {"without": [], "with the rogue": []}
    async with (
        simulated_executor("--max-num-seqs", str(num_streams), step_ms=step_ms) as honest,
        scheduler_of(f"{honest},127.0.0.1:{port}") as (_, ready),
        AsyncClient(f"127.0.0.1:{ready['port']}") as client,
    ):
        await load(client, num_streams, _WARM_UP_S)
        for _ in range(num_turns):
            alone, num_short = await load(client, num_streams, seconds)
            async with module_process("scheduler_cost.rogue", str(port), honest) as rogue:
                await event(rogue, "ready")
                beside, num_short_beside = await load(client, num_streams, seconds)
            if num_short or num_short_beside:
                raise RuntimeError(f"{num_short} and {num_short_beside} requests did not get all of their tokens")
            gaps_ms["without"].append(alone)
            gaps_ms["with the rogue"].append(beside)
    return gaps_ms


def main() -> None:
    """Print medians of the turns, and of the ratios of two."""
    parser = argparse.ArgumentParser(description="Measure what a lying scheduler and executor cost honest requests.")
    parser.add_argument("--num-streams", type=int, default=16, help="clients (default 16)")
    parser.add_argument("--step-ms", type=float, default=5.0, help="steps of the honest executor (default 5)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a turn (default 8)")
    parser.add_argument("--num-turns", type=int, default=5, help="of each kind (default 5)")
    options = parser.parse_args()
    gaps_ms = asyncio.run(measure(options.num_streams, options.step_ms, options.seconds, options.num_turns))
    for name, place in (("median", 49), ("p99", 98)):
        kinds = (gaps_ms["without"], gaps_ms["with the rogue"])
        without, beside = ([statistics.quantiles(turn, n=100)[place] for turn in kind] for kind in kinds)
        ratio = statistics.median(some / none for none, some in zip(without, beside, strict=True))
        print(
            f"gaps of {options.num_streams} streams, {name}: {statistics.median(without):.1f} ms without, "
            f"{statistics.median(beside):.1f} ms with the rogue, ratio {ratio:.2f}"
        )


if __name__ == "__main__":
    end_with_what_was_started()
    main()

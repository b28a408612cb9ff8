"""Kill schedulers and time their successors: `python -m cold_start [--num-kills 20] [--prompt chat]`.

Runs simulated executors, with a vocabulary of the usual size, and a scheduler as processes of their own; streams
through the client library keep running in this one. Kills the scheduler with SIGKILL again and again, starts the next
at once on the same ports, and prints how long after the kill each part of the comeback was reached.
"""

import argparse
import asyncio
import os
import statistics
import sys

from cold_start.streams import PROMPTS, Streams
from cold_start.system import Comeback, System
from paceline_client import AsyncClient

_SETTLE_S = 1.5  # between a comeback and the next kill


async def main() -> None:
    """Print one line per kill, then the table."""
    options = _options()
    print(f"load average {os.getloadavg()[0]:.1f} before the start", file=sys.stderr)
    async with (
        System.running(options.num_executors, options.num_streams, options.vocab_size) as system,
        AsyncClient(system.target) as client,
    ):
        streams = Streams(client, PROMPTS[options.prompt], options.num_prompt_tokens)
        async with streams.running(options.num_streams):
            comebacks = [await _kill(system, streams) for _ in range(options.num_kills)]
    _print_table(comebacks)


async def _kill(system: System, streams: Streams) -> Comeback:
    await asyncio.sleep(_SETTLE_S)
    killed_s = await system.kill_scheduler()
    await system.start_scheduler()
    parts = await system.parts_since(killed_s)
    parts["every stream goes on"] = await streams.gone_on_since(killed_s)
    parts["CPU time of the scheduler by then"] = system.scheduler.cpu_s
    comeback = Comeback(parts, streams.gaps_since(killed_s))
    print(", ".join(f"{name} {seconds:.3f} s" for name, seconds in comeback.parts.items()), flush=True)
    return comeback


def _print_table(comebacks: list[Comeback]) -> None:
    print(f"\n{len(comebacks)} kills; load average {os.getloadavg()[0]:.1f}\n")
    print("| seconds after the kill | median | p99 | longest |\n|---|---|---|---|")
    for name in comebacks[0].parts:
        _print_row(name, [comeback.parts[name] for comeback in comebacks])
    _print_row("pause of a stream", [gap for comeback in comebacks for gap in comeback.gaps_s])


def _print_row(name: str, seconds: list[float]) -> None:
    p99 = statistics.quantiles(seconds, n=100, method="inclusive")[98] if len(seconds) > 1 else seconds[0]
    print(f"| {name} | {statistics.median(seconds):.2f} | {p99:.2f} | {max(seconds):.2f} |")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m cold_start", description="Time the successors of killed schedulers."
    )
    parser.add_argument("--num-kills", type=int, default=20, help="default 20")
    parser.add_argument("--num-streams", type=int, default=100, help="default 100")
    parser.add_argument("--num-executors", type=int, default=2, help="default 2")
    parser.add_argument("--num-prompt-tokens", type=int, default=1000, help="of each stream (default 1000)")
    parser.add_argument("--vocab-size", type=int, default=49_152, help="default 49152")
    parser.add_argument("--prompt", choices=tuple(PROMPTS), default="text", help="what clients send (default text)")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main())

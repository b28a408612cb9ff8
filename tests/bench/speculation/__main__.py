"""Time streams with drafts beside the same without, in turn: `python -m speculation [--streams 1 4 32] [--rounds 5]`.

Runs an executor of the default model, and schedulers one after another: one that chooses how many drafts there are, and
one for each `--fixed` number. The ratio is that of the tokens per second; outputs are greedy, so they are the same, and
that is checked. Prompts are in the prefix cache.
"""

import argparse
import asyncio
import os
import shlex
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from paceline_client import AsyncClient, Result, Sampling, Scheduling, Stopping
from paceline_scheduler.testing.measured_processes import NO_BUDGETS, event, module_process
from speculation.prompts import PROMPTS, Kind

_STOPPING = Stopping(max_tokens=160)
_GREEDY = Sampling(temperature=0.0)
_PLAIN = Scheduling(max_num_draft_tokens=0)
_DRAFTED = Scheduling()
_PORTS = ("--port", "0", "--health-port", "0", "--metrics-port", "0")
_CHOSEN = 0


@dataclass(frozen=True, slots=True)
class Speed:
    """What a series of streams came to."""

    tokens_per_s: float
    num_tokens: int
    num_drafted: int
    num_accepted: int
    texts: tuple[str, ...]


async def main() -> None:
    """Print the table."""
    options = _options()
    print(f"load average {os.getloadavg()[0]:.1f} before the start", file=sys.stderr)
    print("| prompts | streams | drafts | tokens/s without | with | ratio | accepted | outputs |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    async with module_process("paceline_executor", *_PORTS, *shlex.split(options.executor_options)) as executor:
        address = f"127.0.0.1:{(await event(executor, 'ready'))['port']}"
        for num_drafts in (_CHOSEN, *options.fixed):
            async with _scheduler(address, num_drafts) as target, AsyncClient(target) as client:
                for num_streams in options.streams if num_drafts == _CHOSEN else options.streams[:1]:
                    for kind in Kind:
                        await _compare(client, kind, num_streams, num_drafts, options.rounds)


async def _compare(client: AsyncClient, kind: Kind, num_streams: int, num_drafts: int, rounds: int) -> None:
    """Print one line."""
    ratios: list[float] = []
    for number in range(rounds + 1):
        plain = await _speed(client, kind, num_streams, _PLAIN)
        drafted = await _speed(client, kind, num_streams, _DRAFTED)
        if number:  # the first round warms up
            ratios.append(drafted.tokens_per_s / plain.tokens_per_s)
    same = sum(one == other for one, other in zip(plain.texts, drafted.texts, strict=True))
    print(
        f"| {kind} | {num_streams} | {num_drafts or 'chosen'} | {plain.tokens_per_s:.0f} | {drafted.tokens_per_s:.0f}"
        f" | {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        f" | {drafted.num_accepted} of {drafted.num_drafted} for {drafted.num_tokens} tokens"
        f" | {same} of {len(plain.texts)} equal |",
        flush=True,
    )


async def _speed(client: AsyncClient, kind: Kind, num_streams: int, scheduling: Scheduling) -> Speed:
    """Run every prompt of a kind, so many at once."""
    prompts = PROMPTS[kind]
    waiting = iter(prompts * -(-max(num_streams, len(prompts)) // len(prompts)))
    results: dict[int, Result] = {}

    async def work_off(worker: int) -> None:
        for number, prompt in enumerate(waiting):
            results[worker * 1000 + number] = await client.generate(
                messages=[{"role": "user", "content": prompt}],
                sampling=_GREEDY,
                stopping=_STOPPING,
                scheduling=scheduling,
            )

    start = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for worker in range(num_streams):
            tasks.create_task(work_off(worker))
    elapsed_s = time.perf_counter() - start
    usages = [result.usage for result in results.values()]
    num_tokens = sum(usage.num_output_tokens for usage in usages)
    return Speed(
        num_tokens / elapsed_s,
        num_tokens,
        sum(usage.num_draft_tokens for usage in usages),
        sum(usage.num_accepted_draft_tokens for usage in usages),
        tuple(sorted(result.text for result in results.values())),
    )


@asynccontextmanager
async def _scheduler(executor: str, num_drafts: int) -> AsyncIterator[str]:
    """Run one that chooses, or one that always wants so many drafts; yields its address."""
    options = (*_PORTS, "--admin-port", "0", "--executors", executor, "--takeover", *NO_BUDGETS)
    fixed = ("speculation.fixed_scheduler", str(num_drafts)) if num_drafts else ("paceline_scheduler",)
    async with module_process(*fixed, *options) as process:
        yield f"127.0.0.1:{(await event(process, 'ready'))['port']}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m speculation", description="Time drafts of a real model.")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 32], help="at once (default 1 4 32)")
    parser.add_argument("--fixed", type=int, nargs="*", default=[], help="numbers of drafts to compare the choice with")
    parser.add_argument("--rounds", type=int, default=5, help="of both, in turn (default 5)")
    parser.add_argument("--executor-options", default="", help="in one string, such as '--num-threads 1'")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main())

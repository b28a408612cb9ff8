"""Time streams with drafts beside the same without, in turn: `python -m speculation [--streams 1 4 32] [--rounds 5]`.

The scheduler chooses how many drafts there are. With `--fixed` a second system, which gives every row as many, takes
turns with it, round by round. A ratio is that of the tokens per second to those without drafts of the same system.
`--cpu-time` takes seconds of the executor's CPU, which other processes hardly change, with its steps on one thread.
Outputs are greedy, so they are the same, and that is checked. Prompts are in the prefix cache.
"""

import argparse
import asyncio
import os
import shlex
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from paceline_client import AsyncClient, Result, Sampling, Scheduling, Stopping
from paceline_scheduler.testing.measured_processes import NO_BUDGETS, cpu_ns, event, module_process, scheduler_of
from process_groups import end_with_what_was_started
from speculation.prompts import PROMPTS, Kind

_STOPPING = Stopping(max_tokens=160)
_GREEDY = Sampling(temperature=0.0)
_PLAIN = Scheduling(max_num_draft_tokens=0)
_PORTS = ("--port", "0", "--health-port", "0", "--metrics-port", "0")
_CHOSEN = 0


@dataclass(frozen=True, slots=True)
class System:
    """An executor, and a client of its scheduler."""

    executor: asyncio.subprocess.Process
    client: AsyncClient
    of_cpu: bool

    def now_s(self) -> float:
        return cpu_ns(self.executor) / 1e9 if self.of_cpu else time.perf_counter()


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
    print("| prompts | streams | drafts | tokens/s without | with | ratio | chosen by it | accepted | outputs |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    async with AsyncExitStack() as systems:
        choosing = await systems.enter_async_context(_system("paceline_scheduler", options))
        fixing = choosing
        if options.fixed:
            fixing = await systems.enter_async_context(_system("speculation.fixed_scheduler", options))
        for num_streams in options.streams:
            for kind in options.prompts or Kind:
                rounds = [
                    await _round(choosing, fixing, kind, num_streams, options.fixed) for _ in range(options.rounds + 1)
                ]
                _print_lines(kind, num_streams, rounds[1:])  # the first round warms up


async def _round(
    choosing: System, fixing: System, kind: Kind, num_streams: int, fixed: list[int]
) -> dict[int, tuple[Speed, Speed]]:
    """Without drafts and with, by the number of drafts."""
    plain = await _speed(choosing, kind, num_streams, _PLAIN)
    speeds = {_CHOSEN: (plain, await _speed(choosing, kind, num_streams, Scheduling()))}
    if fixed:
        plain = await _speed(fixing, kind, num_streams, _PLAIN)
    for num_drafts in fixed:
        drafts = Scheduling(max_num_draft_tokens=num_drafts)
        speeds[num_drafts] = plain, await _speed(fixing, kind, num_streams, drafts)
    return speeds


def _print_lines(kind: Kind, num_streams: int, rounds: list[dict[int, tuple[Speed, Speed]]]) -> None:
    for num_drafts in rounds[0]:
        ratios = [_ratio(*speeds[num_drafts]) for speeds in rounds]
        beside = [_ratio(*speeds[_CHOSEN]) / ratio for speeds, ratio in zip(rounds, ratios, strict=True)]
        plain, drafted = rounds[-1][num_drafts]
        same = sum(one == other for one, other in zip(plain.texts, drafted.texts, strict=True))
        print(
            f"| {kind} | {num_streams} | {num_drafts or 'chosen'}"
            f" | {plain.tokens_per_s:.0f} | {drafted.tokens_per_s:.0f} | {_spread(ratios)} | {_spread(beside)}"
            f" | {drafted.num_accepted} of {drafted.num_drafted} for {drafted.num_tokens} tokens"
            f" | {same} of {len(plain.texts)} equal |",
            flush=True,
        )


def _ratio(plain: Speed, drafted: Speed) -> float:
    return drafted.tokens_per_s / plain.tokens_per_s


def _spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


async def _speed(system: System, kind: Kind, num_streams: int, scheduling: Scheduling) -> Speed:
    """Run every prompt of a kind, so many at once."""
    prompts = PROMPTS[kind]
    waiting = iter(prompts * -(-max(num_streams, len(prompts)) // len(prompts)))
    results: dict[int, Result] = {}

    async def work_off(worker: int) -> None:
        for number, prompt in enumerate(waiting):
            results[worker * 1000 + number] = await system.client.generate(
                messages=[{"role": "user", "content": prompt}],
                sampling=_GREEDY,
                stopping=_STOPPING,
                scheduling=scheduling,
            )

    start_s = system.now_s()
    async with asyncio.TaskGroup() as tasks:
        for worker in range(num_streams):
            tasks.create_task(work_off(worker))
    elapsed_s = system.now_s() - start_s
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
async def _system(scheduler: str, options: argparse.Namespace) -> AsyncIterator[System]:
    own = shlex.split(options.executor_options) + ["--num-threads", "1"] * options.cpu_time
    async with module_process("paceline_executor", *_PORTS, *own) as executor:
        address = f"127.0.0.1:{(await event(executor, 'ready'))['port']}"
        async with (
            scheduler_of(address, *NO_BUDGETS, module=scheduler) as (_, ready),
            AsyncClient(f"127.0.0.1:{ready['port']}") as client,
        ):
            yield System(executor, client, options.cpu_time)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m speculation", description="Time drafts of a real model.")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 32], help="at once (default 1 4 32)")
    parser.add_argument("--fixed", type=int, nargs="*", default=[], help="numbers of drafts to compare the choice with")
    parser.add_argument("--prompts", type=Kind, nargs="*", default=[], help=f"kinds of {', '.join(Kind)} (default all)")
    parser.add_argument("--rounds", type=int, default=5, help="of both, in turn (default 5)")
    parser.add_argument("--cpu-time", action="store_true", help="of the executor, with one thread, not the clock's")
    parser.add_argument("--executor-options", default="", help="in one string, such as '--num-threads 1'")
    return parser.parse_args()


if __name__ == "__main__":
    end_with_what_was_started()
    asyncio.run(main())

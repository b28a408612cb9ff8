"""Runs: one seed here, or many spread over processes."""

import gc
import logging
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from multiprocessing import get_context
from typing import Any

import structlog

from simulation.device import InjectedError
from simulation.scenario import FaultKind, draw_scenario, on_twins
from simulation.trace import Trace
from simulation.world import Outcome, World

_SEEDS_AT_ONCE = 25


@dataclass(slots=True)
class Summary:
    """What came of many runs."""

    num_seeds: int = 0
    num_events: int = 0
    digests: blake2b = field(default_factory=lambda: blake2b(digest_size=16))
    virtual_s: float = 0.0
    real_s: float = 0.0
    ends: Counter[str] = field(default_factory=Counter)
    failed: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.num_seeds += 1
        self.num_events += outcome.num_events
        self.digests.update(outcome.digest.encode())
        self.virtual_s += outcome.lasted_s
        self.ends.update(outcome.ends.values())
        if outcome.failures:
            self.failed.append(outcome)

    def __str__(self) -> str:
        ends = ", ".join(f"{count} {end}" for end, count in sorted(self.ends.items()))
        return (
            f"trace {self.digests.hexdigest()}; "
            f"{self.num_seeds} seeds, {len(self.failed)} failed; {self.num_seeds / self.real_s:.1f} seeds/s, "
            f"{self.virtual_s / self.real_s:.0f} times faster than real time; requests: {ends}"
        )


def run_seed(seed: int, *, whole_story: bool = False, is_on_twins: bool = False) -> tuple[Outcome, str]:
    """Run what a seed stands for; returns its outcome and its story, whole or only the end of it."""
    trace, scenario = Trace(is_kept_whole=whole_story), draw_scenario(seed)
    return run_world(World(on_twins(scenario) if is_on_twins else scenario, trace), trace), trace.story()


def run_world(world: World, trace: Trace) -> Outcome:
    with _logs_of(world, trace):
        return world.run()


def run_seeds(seeds: Sequence[int], num_processes: int, *, is_on_twins: bool = False) -> Summary:
    """Run many seeds; in this process if it is to be one."""
    summary = Summary()
    started_s = time.perf_counter()
    run_part = partial(_run_part, is_on_twins=is_on_twins)
    for outcome in run_part(seeds) if num_processes == 1 else _run_spread(run_part, seeds, num_processes):
        summary.add(outcome)
    summary.real_s = time.perf_counter() - started_s
    return summary


def first_failure(seeds: Sequence[int], needed: FaultKind | None) -> Outcome | None:
    """Run seeds here until one fails; those without the needed fault are passed over."""
    kinds = {seed: [fault.kind for fault in draw_scenario(seed).faults] for seed in seeds}
    chosen = (seed for seed in seeds if needed is None or needed in kinds[seed])
    return next((outcome for seed in chosen if (outcome := run_seed(seed)[0]).failures), None)


def _run_spread(
    run_part: Callable[[Sequence[int]], list[Outcome]], seeds: Sequence[int], num_processes: int
) -> Iterator[Outcome]:
    parts = [seeds[first : first + _SEEDS_AT_ONCE] for first in range(0, len(seeds), _SEEDS_AT_ONCE)]
    with ProcessPoolExecutor(num_processes, get_context("spawn"), initializer=gc.freeze) as processes:
        for outcomes in processes.map(run_part, parts):
            yield from outcomes


def _run_part(seeds: Sequence[int], *, is_on_twins: bool) -> list[Outcome]:
    return [run_seed(seed, is_on_twins=is_on_twins)[0] for seed in seeds]


@contextmanager
def _logs_of(world: World, trace: Trace) -> Iterator[None]:
    """Hear what is logged: an error is a failure; the rest is part of a whole story."""
    before = structlog.get_config()

    def hear(_: object, level: str, event: MutableMapping[str, Any]) -> str:
        words = " ".join(f"{name}={value}" for name, value in event.items() if name != "exc_info")
        if event.get("exc_info"):
            words += f" {sys.exc_info()[1]!r}"
        trace.remark(world.loop.now_s, world.loop.node.name, f"log: {words}")
        if level in ("error", "critical", "exception") and not isinstance(event.get("exc_info"), InjectedError):
            trace.remark(world.loop.now_s, world.loop.node.name, traceback.format_exc())
            world.report(f"logged as an error: {words}")
        raise structlog.DropEvent

    lowest = logging.INFO if trace.is_kept_whole else logging.ERROR
    structlog.configure(processors=[hear], wrapper_class=structlog.make_filtering_bound_logger(lowest))
    try:
        yield
    finally:
        structlog.configure(**before)

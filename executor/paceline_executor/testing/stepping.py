"""Engines for tests: one that executes plans one by one, and how engines of tests see their runner."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from paceline.plan.values import BatchPlan, StepResult, StepTimings
from paceline_executor.errors import StepFailedError
from paceline_executor.link.engine import Engine
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.interface import Runner
from paceline_executor.testing.hiding_runner import HidingRunner

_seen_as: list[Callable[[Runner], Runner]] = []


@contextmanager
def hidden_runners() -> Iterator[None]:
    """Engines made in this block see their runner only through one that hides what has not landed."""
    _seen_as.append(HidingRunner)
    try:
        yield
    finally:
        _seen_as.pop()


def as_seen(runner: Runner) -> Runner:
    return _seen_as[-1](runner) if _seen_as else runner


class SteppingEngine(Engine):
    """`runner` is the one inside, to break it."""

    def __init__(self, table: RowTable, runner: Runner, *more: Callable[[], int]) -> None:
        super().__init__(table, as_seen(runner), *more)
        self.runner = runner

    def execute(self, plan: BatchPlan) -> StepResult:
        return self.collect(self.launch(plan))


def outcome_of(execute: Callable[[], StepResult]) -> StepResult | None:
    """None when it failed; without times, since no two runs take the same."""
    try:
        return replace(execute(), timings=StepTimings())
    except StepFailedError:
        return None

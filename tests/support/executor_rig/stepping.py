"""Engines for tests: one that executes plans one by one, and how engines of tests see their runner."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from executor_rig.hash_runner import HashRunner
from executor_rig.hiding_runner import HidingRunner
from paceline.plan.values import BatchPlan, StepResult, StepTimings
from paceline_executor.errors import StepFailedError
from paceline_executor.limits import RowLimits
from paceline_executor.link.engine import Engine
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.interface import Runner

View = Callable[[HashRunner, RowLimits], Runner]
_seen_as: list[View] = []


@contextmanager
def runners_seen_as(view: View) -> Iterator[None]:
    """Engines made in this block get another runner, made of theirs."""
    _seen_as.append(view)
    try:
        yield
    finally:
        _seen_as.pop()


def hidden(runner: HashRunner, _: RowLimits) -> Runner:
    """A view: whatever has not landed is hidden."""
    return HidingRunner(runner)


def are_seen() -> bool:
    """Whether engines get the very runner that they are given."""
    return not _seen_as


def as_seen(runner: Runner, limits: RowLimits) -> Runner:
    return _seen_as[-1](runner, limits) if _seen_as and isinstance(runner, HashRunner) else runner


class SteppingEngine(Engine):
    """`inner` is the runner as it was given, to break it."""

    def __init__(self, table: RowTable, runner: Runner, *more: Callable[[], int]) -> None:
        super().__init__(table, as_seen(runner, table.limits), *more)
        self.inner = runner

    def execute(self, plan: BatchPlan) -> StepResult:
        return self.collect(self.launch(plan))


def outcome_of(execute: Callable[[], StepResult]) -> StepResult | None:
    """None when it failed; without times, since no two runs take the same."""
    try:
        return replace(execute(), timings=StepTimings())
    except StepFailedError:
        return None

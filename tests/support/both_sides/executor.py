"""An executor that is driven plan by plan in its caller's time: its rows and its engine, without streams and threads.

Knows what a plan stream checks and what a step loop does, one step after another. Its scheduler is the caller.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from paceline.plan.values import (
    BatchPlan,
    FailedStep,
    RecordId,
    RowState,
    SnapshotPart,
    StepResult,
    Welcome,
)
from paceline_executor.errors import StepFailedError
from paceline_executor.limits import RowLimits
from paceline_executor.link.description import Load, Loaded
from paceline_executor.link.engine import Engine
from paceline_executor.link.failure_attribution import FailureAttribution
from paceline_executor.link.plan_streams import MAX_PART_BYTES
from paceline_executor.rows import snapshot
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.interface import Runner
from paceline_executor.runner.simulated import SimulatedRunner
from paceline_executor.runner.step_times import StepTimeCurve
from paceline_executor.start.loading import describe_simulated
from paceline_executor.start.opening import simulated_tokenizer
from paceline_scheduler.core.executors import ExecutorDescription, Snapshot
from paceline_scheduler.link.snapshots import SnapshotJoiner
from paceline_scheduler.link.wire_contexts import with_contexts

TAG_KEY = bytes(range(32))


class WithRows:
    """Shows the requests of its rows."""

    table: RowTable

    @property
    def rows(self) -> dict[int, RowState]:
        return {state.row: state for state in self.table.states() if state.row is not None}

    @property
    def records(self) -> dict[RecordId, RowState]:
        """The requests that have left their rows."""
        return {state.record_id: state for state in self.table.states() if state.row is None}


class InlineExecutor(WithRows):
    """One executor. `incarnation` stands for the process: `restart` makes another one of it that knows nothing."""

    def __init__(self, load: Load, incarnation: int = 1, max_plans_in_flight: int = 4) -> None:
        self.incarnation = incarnation
        self.epoch = 0
        self.num_steps = 0  # that did not fail
        self._max_plans_in_flight = max_plans_in_flight
        self._load = load
        self._failed_step: FailedStep | None = None
        self._begin()

    def restart(self) -> None:
        """Die and come back: another incarnation without rows, records, blocks or tags."""
        self.incarnation += 1
        self.epoch = 0
        self._begin()

    @property
    def num_plans_waiting(self) -> int:
        return len(self._waiting)

    def attach(self, address: str) -> tuple[ExecutorDescription, Snapshot]:
        """Accept a scheduler: another epoch, plans that did not run are dropped, and the state at this boundary."""
        self.epoch += 1
        self.drop_waiting()
        self._last_step_id = 0
        self.table.begin_epoch()
        return ExecutorDescription.of(address, self.welcome()), self.snapshot()

    def snapshot(self) -> Snapshot:
        """Return rows, records and tags as a scheduler sees them."""
        joiner, found = SnapshotJoiner(self.welcome()), None
        for part in self.parts():
            found = joiner.add(part)
        assert found is not None, "the last part ends it"
        return found

    def parts(self) -> Iterator[SnapshotPart]:
        return snapshot.parts_of(snapshot.RowSnapshot(self.table.states(), self.table.tags()), MAX_PART_BYTES)

    def receive(self, plan: BatchPlan) -> None:
        """Take a plan in; it must be the next one of this epoch."""
        expected = (self.incarnation, self.epoch, self._last_step_id + 1)
        assert (plan.incarnation, plan.epoch, plan.step_id) == expected, f"not the plan {expected}"
        assert len(self._waiting) < self._max_plans_in_flight, "more plans in flight than the executor takes"
        self._last_step_id += 1
        self._waiting.append(with_contexts(plan))

    def run_next(self) -> StepResult:
        """Run the oldest waiting plan. Raises StepFailedError when it fails: then those behind it are dropped.

        Raises DeviceError when the process has to end, and `restart` to follow.
        """
        plan = self._waiting.popleft()
        try:
            result = self._engine.collect(self._engine.launch(plan))
        except StepFailedError as error:
            self.drop_waiting()
            self._failed_step = FailedStep(self.epoch, plan.step_id, str(error))
            self._attribution.failed(plan, self.table)
            raise
        self._attribution.succeeded(plan)
        self.num_steps += 1
        return result

    def execute(self, plan: BatchPlan) -> StepResult:
        self.receive(plan)
        assert self.num_plans_waiting == 1, "execute() is for plans that run as they arrive; else receive() and run"
        return self.run_next()

    def drop_waiting(self, num_kept: int = 0) -> None:
        """Forget the plans that have not run, wholly, but for the first ones."""
        while len(self._waiting) > num_kept:
            self._waiting.pop()

    def welcome(self) -> Welcome:
        """Return what it is, as it would say now."""
        welcome = self._description.welcome(self.incarnation, TAG_KEY, self._max_plans_in_flight)
        return replace(welcome, epoch=self.epoch, failed_step=self._failed_step)

    def _begin(self) -> None:
        loaded = self._load()
        self._engine, self._description = loaded.engine, loaded.description
        self.table = self._engine.table
        self._waiting: deque[BatchPlan] = deque()
        self._last_step_id = 0
        self._failed_step = None
        self._attribution = FailureAttribution()


def load_plain(limits: RowLimits, step_times: StepTimeCurve) -> Loaded:
    """Return rows on the simulated runner, whose steps are told to take their time and take none."""
    runner = SimulatedRunner(
        limits.num_blocks,
        limits.block_size,
        limits.vocab_size,
        step_times=step_times,
        clock_ns=lambda: 0,
        sleep=lambda _: None,
    )
    return loaded_on(runner, limits)


def loaded_on(runner: Runner, limits: RowLimits) -> Loaded:
    """Return rows on a runner, as an executor without a model loads them."""
    description = describe_simulated("simulated", runner, limits, simulated_tokenizer())
    return Loaded(Engine(RowTable(limits), runner, lambda: 0), description)

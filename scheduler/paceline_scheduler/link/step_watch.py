"""Finished steps: their sums for whoever asks, and each one for those who watch, which costs nothing otherwise."""

from dataclasses import dataclass

import numpy as np

from paceline.plan.values import BatchPlan, Int32Array, StepResult
from paceline_scheduler.backend import StepRecord, StepSink, StepTotals
from paceline_scheduler.core.core import Core
from paceline_scheduler.core.tables.blocks import BlockCounts

MAX_WATCHERS = 64


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """What is remembered of a plan for the record of its step.

    `follows_work` says that the step before it had not ended, or ended just then: what the executor then waits for is
    this plan, not a request.
    """

    num_scheduled_tokens: Int32Array  # [num_rows]
    predicted_ns: int
    planning_ns: int
    follows_work: bool


def planned_step(plan: BatchPlan, planning_ns: int, follows_work: bool) -> PlannedStep:
    """Return what is remembered of a plan."""
    return PlannedStep(plan.num_scheduled_tokens, plan.predicted_ns, planning_ns, follows_work)


def _count(totals: StepTotals, planned: PlannedStep, result: StepResult) -> None:
    """Add a finished step to the sums of its executor."""
    timings = result.timings
    totals.num_steps += 1
    totals.num_rows += len(result.rows)
    totals.num_output_tokens += len(result.token_ids)
    totals.waited_ns += timings.waited_ns
    totals.prepare_ns += timings.prepare_ns
    totals.forward_ns += timings.forward_ns
    totals.sample_ns += timings.sample_ns
    totals.idle_ns += timings.idle_ns
    if planned.follows_work:
        totals.starved_ns += timings.idle_ns
    totals.planning_ns += planned.planning_ns


class StepWatch:
    """The watchers, oldest first."""

    def __init__(self) -> None:
        self._sinks: list[StepSink] = []

    def add(self, sink: StepSink) -> None:
        """Tell `sink` from now on; the oldest watcher gives way when there are too many."""
        self._sinks.append(sink)
        del self._sinks[:-MAX_WATCHERS]

    def remove(self, sink: StepSink) -> None:
        """Stop telling `sink`."""
        if sink in self._sinks:
            self._sinks.remove(sink)

    def finished(self, address: str, totals: StepTotals, planned: PlannedStep, result: StepResult, core: Core) -> None:
        """Count a finished step of an executor, whose sums are `totals`, and tell who watches how `core` stands now."""
        _count(totals, planned, result)
        if self._sinks:
            num_waiting, _ = core.num_waiting()
            self._tell(address, planned, result, num_waiting, core.counts(address).blocks)

    def _tell(
        self, address: str, planned: PlannedStep, result: StepResult, num_waiting_requests: int, blocks: BlockCounts
    ) -> None:
        timings = result.timings
        record = StepRecord(
            address=address,
            epoch=result.epoch,
            step_id=result.step_id,
            num_rows=len(planned.num_scheduled_tokens),
            num_tokens=int(np.add.reduce(planned.num_scheduled_tokens)),
            num_output_tokens=len(result.token_ids),
            predicted_ns=planned.predicted_ns,
            waited_ns=timings.waited_ns,
            prepare_ns=timings.prepare_ns,
            forward_ns=timings.forward_ns,
            sample_ns=timings.sample_ns,
            idle_ns=timings.idle_ns,
            planning_ns=planned.planning_ns,
            num_waiting_requests=num_waiting_requests,
            num_total_blocks=blocks.total,
            num_free_blocks=blocks.free,
            num_cached_blocks=blocks.cached,
            num_used_blocks=blocks.used,
            num_quarantined_blocks=blocks.total - blocks.free - blocks.cached - blocks.used,
        )
        for sink in tuple(self._sinks):
            sink.step_finished(record)

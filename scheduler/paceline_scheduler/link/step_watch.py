"""Finished steps for those who watch. Costs nothing while nobody does."""

from dataclasses import dataclass

from paceline_scheduler.backend import StepRecord, StepSink
from paceline_scheduler.core.blocks import BlockCounts
from paceline_scheduler.core.plan import BatchPlan, StepResult

MAX_WATCHERS = 64


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """What is remembered of a plan for the record of its step."""

    num_rows: int
    num_tokens: int
    predicted_ns: int
    planning_ns: int


def planned_step(plan: BatchPlan, planning_ns: int) -> PlannedStep:
    """Return what is remembered of a plan."""
    return PlannedStep(len(plan.rows), plan.num_tokens, plan.predicted_ns, planning_ns)


class StepWatch:
    """The watchers, oldest first."""

    def __init__(self) -> None:
        self._sinks: list[StepSink] = []

    @property
    def is_watched(self) -> bool:
        """Whether anybody watches."""
        return bool(self._sinks)

    def add(self, sink: StepSink) -> None:
        """Tell `sink` from now on; the oldest watcher gives way when there are too many."""
        self._sinks.append(sink)
        del self._sinks[:-MAX_WATCHERS]

    def remove(self, sink: StepSink) -> None:
        """Stop telling `sink`."""
        if sink in self._sinks:
            self._sinks.remove(sink)

    def tell(
        self, address: str, planned: PlannedStep, result: StepResult, num_waiting_requests: int, blocks: BlockCounts
    ) -> None:
        """A step is finished."""
        timings = result.timings
        record = StepRecord(
            address=address,
            epoch=result.epoch,
            step_id=result.step_id,
            num_rows=planned.num_rows,
            num_tokens=planned.num_tokens,
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

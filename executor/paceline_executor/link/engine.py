"""One step from plan to result: rows change, the device computes, rows advance.

Knows the table and the runner and calls both from the thread it is called in. It refuses to know threads, queues and
schedulers.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from paceline.plan.values import BatchPlan, StepResult
from paceline_executor.errors import ServiceError, StepFailedError
from paceline_executor.rows.batch import Prepared
from paceline_executor.rows.table import Applied, RowTable
from paceline_executor.runner.interface import Runner, StepOutput

_NO_OUTPUT = StepOutput(token_ids=np.empty(0, dtype=np.int32), logprobs={}, problems={}, forward_ns=0, sample_ns=0)


@dataclass(frozen=True, slots=True)
class Step:
    """A step that was executed, and where its time went."""

    result: StepResult
    prepare_ns: int
    forward_ns: int
    sample_ns: int


class Engine:
    """Executes plans on a runner, one after another."""

    def __init__(self, table: RowTable, runner: Runner, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.table = table
        self._runner = runner
        self._clock_ns = clock_ns

    def execute(self, plan: BatchPlan) -> Step:
        """Run one plan.

        Raises PlanError or UnsupportedPlanError for a plan that cannot be applied and StepFailedError when anything
        else goes wrong; the rows are then as they were before.
        """
        try:
            step = self._execute(plan)
        except ServiceError:
            raise
        except Exception as error:
            what = "memory ran out" if _is_out_of_memory(error) else f"an unexpected {type(error).__name__}"
            raise StepFailedError(f"a step failed on the executor: {what}; its log says more") from error
        # The rows have advanced: what went wrong here would be no failed step.
        self.table.trim_records(self._clock_ns())
        return step

    def _execute(self, plan: BatchPlan) -> Step:
        start_ns = self._clock_ns()
        applied = self.table.apply(plan, start_ns)
        try:
            return self._compute(plan, applied, start_ns)
        except Exception:
            self.table.take_back(plan, applied)
            raise

    def _compute(self, plan: BatchPlan, applied: Applied, start_ns: int) -> Step:
        if plan.copies.sources.size:
            self._runner.copy_blocks(plan.copies.sources, plan.copies.destinations)
        prepared = self.table.build_batch(plan)
        prepare_ns = self._clock_ns() - start_ns
        output = self._run(prepared)
        output_ns = self._clock_ns()
        result = self.table.finish_step(plan, applied, prepared, output)
        # What follows the device's work is this side's own, like what precedes it.
        prepare_ns += self._clock_ns() - output_ns
        return Step(result, prepare_ns, output.forward_ns, output.sample_ns)

    def _run(self, prepared: Prepared) -> StepOutput:
        return self._runner.execute(prepared.batch) if prepared.rows.size else _NO_OUTPUT


def _is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed; torch says so in the words of a RuntimeError."""
    words = str(error).lower()
    is_torch = isinstance(error, RuntimeError) and ("out of memory" in words or "can't allocate memory" in words)
    return is_torch or isinstance(error, MemoryError)

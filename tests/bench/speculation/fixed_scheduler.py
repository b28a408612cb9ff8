"""A scheduler that gives every row the drafts its request allows: `python -m speculation.fixed_scheduler`.

Apart from the program that measures, because it is a process of its own.
"""

import sys

import numpy as np

from paceline.plan.values import Int32Array
from paceline_scheduler import __main__ as program
from paceline_scheduler.core.planning import drafts
from paceline_scheduler.core.planning.capacity import ExecutorView
from paceline_scheduler.core.planning.step_budget import StepBudget
from paceline_scheduler.core.tables.rows import RowIndex


def main() -> None:
    """Run it."""
    drafts.best_drafts = _all_allowed
    program.main(sys.argv[1:])


def _all_allowed(
    view: ExecutorView, decode_rows: RowIndex, most: Int32Array, budget: StepBudget
) -> tuple[Int32Array, float]:
    del view, decode_rows, budget
    return most.clip(0).astype(np.int32), 0.0


if __name__ == "__main__":
    main()

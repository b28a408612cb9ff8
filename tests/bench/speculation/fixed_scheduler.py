"""A scheduler that gives every row as many drafts, for comparison: `python -m speculation.fixed_scheduler NUM ...`.

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
    num_drafts = int(sys.argv[1])

    def always(
        view: ExecutorView, decode_rows: RowIndex, most: Int32Array, budget: StepBudget
    ) -> tuple[Int32Array, float]:
        del view, decode_rows, budget
        return np.minimum(most, num_drafts).clip(0).astype(np.int32), 0.0

    drafts.best_drafts = always
    program.main(sys.argv[2:])


if __name__ == "__main__":
    main()

"""How many drafts the decoding rows of a step get beside their one token: of those they want, what there is room for.

Drafts are guesses, so they only take what is left over: they never go beyond the tokens that a row may get, never cost
anybody a block or its turn, and leave prompts their share of the step. Apart, since steps without drafts
never come here, and what rows want will be decided here too.
"""

import numpy as np

from paceline.plan.values import Int32Array
from paceline_scheduler.core.planning.capacity import ExecutorView
from paceline_scheduler.core.planning.step_budget import StepBudget
from paceline_scheduler.core.tables.rows import RowIndex


def fit_drafts(
    view: ExecutorView, decode_rows: RowIndex, growing_rows: RowIndex, num_spare_blocks: int, budget: StepBudget
) -> tuple[Int32Array, RowIndex]:
    """Return the drafts of each decoding row, and the rows that get another block, once for each block. `growing_rows`
    get a block for their one token already. The budget is charged.
    """
    rows, block_size = view.rows, view.description.block_size
    positions = rows.num_scheduled[decode_rows]
    drafts = np.minimum(rows.num_drafts[decode_rows], rows.limit[decode_rows] - positions - 1)
    drafts[positions + 1 < rows.num_known[decode_rows]] = 0  # what comes next is known, and computed once more
    num_free = rows.num_slots[decode_rows] + block_size * np.isin(decode_rows, growing_rows) - positions - 1
    lacking = _blocks(drafts - num_free, block_size)
    drafts = np.where(np.cumsum(lacking) <= num_spare_blocks, drafts, np.minimum(drafts, num_free))
    drafts = budget.add_drafts(positions, drafts).astype(np.int32)
    return drafts, np.repeat(decode_rows, _blocks(drafts - num_free, block_size))


def _blocks(num_slots: Int32Array, block_size: int) -> Int32Array:
    """Return how many blocks hold so many slots each, none for less than one."""
    blocks: Int32Array = -(-np.maximum(num_slots, 0) // block_size)
    return blocks

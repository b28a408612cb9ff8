"""Which drafts a step verifies: what a drafter finds, within the plan. No draft is an end token, so a row takes no
token behind one that ends it.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from paceline.plan.values import BatchPlan
from paceline_executor.limits import RowLimits
from paceline_executor.rows.batch import sampling_columns
from paceline_executor.rows.columns import RowColumns
from paceline_executor.runner.interface import Int32Array
from paceline_executor.runner.row_rules import RowRules
from paceline_executor.speculation.drafter import Drafter, WantedDrafts, WantingRow


def put_drafts(
    drafter: Drafter,
    columns: RowColumns,
    rules: Mapping[int, RowRules],
    plan: BatchPlan,
    places: npt.NDArray[np.intp],
    limits: RowLimits,
) -> Int32Array | None:
    """Writes them behind the known tokens of the rows at `places`; returns how many each has, if any."""
    if not plan.num_draft_tokens.any():
        return None
    num_wanted = plan.num_draft_tokens[places]
    rows, wanting = plan.rows[places], np.flatnonzero(num_wanted)
    known = columns.num_known[rows]
    wanting_rows = [
        WantingRow(
            row,
            columns.tokens[row, :num_known],
            num,
            columns.block_table[row, : columns.num_blocks[row]],
            int(columns.num_prompt[row]),
            rules.get(row),
        )
        for row, num_known, num in zip(*(values[wanting].tolist() for values in (rows, known, num_wanted)), strict=True)
    ]
    sampling = sampling_columns(columns, rows[wanting])
    guesses = drafter.draft(WantedDrafts(wanting_rows, sampling, plan.min_draft_chance, plan.draft_spare_ns))
    num_drafts = np.zeros_like(num_wanted)
    for index, of_row, drafts in zip(wanting.tolist(), wanting_rows, guesses, strict=True):
        end_tokens = columns.end_tokens[of_row.row, : columns.max_end_tokens]
        possible = _possible(drafts[: of_row.num_wanted], end_tokens, limits.vocab_size)
        num_drafts[index] = possible.size
        columns.tokens[of_row.row, known[index] : known[index] + possible.size] = possible
    return num_drafts if num_drafts.any() else None


def granted_drafts(plan: BatchPlan, places: npt.NDArray[np.intp], limits: RowLimits) -> Int32Array | None:
    """How many a device may find for each of the rows at `places`, if any."""
    if not plan.num_draft_tokens.any():
        return None
    wanted, room = plan.num_draft_tokens[places], limits.max_device_draws - places.size
    granted: Int32Array = wanted - np.clip(np.cumsum(wanted, dtype=np.int32) - room, 0, wanted)
    return granted if granted.any() else None


def _possible(drafts: Int32Array, end_tokens: Int32Array, vocab_size: int) -> Int32Array:
    """Before the first that ends the row or is no token."""
    is_bad = (drafts < 0) | (drafts >= vocab_size) | (drafts[:, None] == end_tokens).any(axis=1)
    return drafts[: is_bad.argmax()] if is_bad.any() else drafts

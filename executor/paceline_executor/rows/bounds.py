"""Bounds: what rows come to if every step in flight brings all it may.

A bound is at least the truth, and equal to it when no step is in flight.
"""

import numpy as np
import numpy.typing as npt

from paceline.plan.values import BatchPlan
from paceline_executor.errors import PlanError, PlanFault
from paceline_executor.limits import RowLimits
from paceline_executor.rows.batch import Prepared
from paceline_executor.rows.columns import GOES_ON, RowArrays
from paceline_executor.rows.undo import Undo
from paceline_executor.runner.interface import BoolArray, Int32Array


def check_schedule(plan: BatchPlan, columns: RowArrays, limits: RowLimits) -> npt.NDArray[np.intp]:
    """Returns places in the plan's columns of the rows that go on. Raises PlanError for an impossible row."""
    rows, num_tokens, num_drafts = plan.rows, plan.num_scheduled_tokens, plan.num_draft_tokens
    if not rows.size:
        return np.empty(0, dtype=np.intp)
    _require(rows, columns.in_use[rows], PlanFault.ROW_NOT_IN_USE, "is scheduled but holds no request")
    # At its last token a row ends, or has ended before.
    may_go_on = columns.known_bound[rows] < np.minimum(columns.max_known[rows], limits.max_model_len)
    places = np.flatnonzero(may_go_on & (columns.finish[rows] == GOES_ON))
    if places.size < rows.size:
        rows, num_tokens = rows[places], num_tokens[places]
        num_drafts = num_drafts[places] if num_drafts.size else num_drafts
    num_computed = columns.computed_bound[rows]
    end = num_computed.astype(np.int64) + num_tokens
    known, block_size = columns.known_bound[rows], limits.block_size
    if num_drafts.any():
        _check_drafts(rows, num_drafts, end, columns, limits)
        known = known + num_drafts
    _require(rows, end <= known, PlanFault.TOKENS_UNKNOWN, "is scheduled beyond its known tokens")
    has_blocks = end <= columns.num_blocks[rows].astype(np.int64) * block_size
    _require(rows, has_blocks, PlanFault.BLOCK_MISSING, "is scheduled beyond its blocks")
    is_private = num_computed // block_size >= columns.num_shared[rows]
    _require(rows, is_private, PlanFault.BLOCK_SHARED, "would write to a block it only shares")
    return places


def _check_drafts(
    rows: Int32Array, num_drafts: Int32Array, end: npt.NDArray[np.int64], columns: RowArrays, limits: RowLimits
) -> None:
    """They follow all known tokens, and leave room for the token behind them."""
    is_behind = (num_drafts == 0) | (end >= columns.known_bound[rows] + num_drafts)
    _require(rows, is_behind, PlanFault.DRAFTS, "has drafts before the end of its known tokens")
    last = np.minimum(columns.max_known[rows], limits.max_model_len)
    _require(rows, (num_drafts == 0) | (end < last), PlanFault.DRAFTS, "has drafts beyond its last token")


def raise_bounds(columns: RowArrays, prepared: Prepared, undo: Undo) -> None:
    rows, sampled = prepared.rows, prepared.rows[prepared.batch.sampled]

    def lower() -> None:
        # Steps that landed since may have lowered them.
        columns.computed_bound[rows] -= prepared.num_tokens
        columns.known_bound[sampled] -= prepared.num_draws

    undo.add(lower)
    columns.computed_bound[rows] = prepared.batch.context_lens
    columns.known_bound[sampled] += prepared.num_draws


def _require(rows: Int32Array, holds: BoolArray, fault: PlanFault, sentence: str) -> None:
    if not holds.all():
        raise PlanError(fault, f"row {rows[holds.argmin()]} {sentence}")

"""How many drafts the decoding rows of a step get: as many as bring the most tokens per time.

Drafts only take what is left over: they cost nobody a block or its turn, and are in no step that computes a prompt.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.plan.values import NO_COLUMN, Int32Array
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.planning.capacity import ExecutorView
from paceline_scheduler.core.planning.speculation import Float64Array
from paceline_scheduler.core.planning.step_budget import StepBudget
from paceline_scheduler.core.tables.rows import RowIndex

_CHANCE_STEPS = 256  # so that a chance is the same on both sides of the wire
_MAX_SLOWDOWN = 2.0
"""A step with drafts takes at most so many plain steps while a row has none."""


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """spare_ns: beyond the step's predicted time, for what drafters lack of rows. growing_rows: those that get another
    block, once for each block.
    """

    num_drafts: Int32Array  # of each decoding row
    min_chance: float  # that a draft is right, for it to pay
    spare_ns: int
    growing_rows: RowIndex


NO_DRAFTING = DraftPlan(NO_COLUMN, 0.0, 0, np.zeros(0, dtype=np.intp))


def fit_drafts(
    view: ExecutorView,
    decode_rows: RowIndex,
    growing_rows: RowIndex,
    num_spare_blocks: int,
    budget: StepBudget,
    limits: CoreLimits,
) -> DraftPlan:
    """`growing_rows` get a block for their one token already. Charges the budget."""
    plain_ns = budget.predicted_ns()
    rows, block_size = view.rows, view.description.block_size
    positions = rows.num_scheduled[decode_rows]
    most = np.minimum(rows.max_drafts[decode_rows], rows.limit[decode_rows] - positions - 1)
    most = np.minimum(most, limits.max_num_draft_tokens)
    most[positions + 1 < rows.num_known[decode_rows]] = 0  # what comes next is known
    if most.max() <= 0:
        return NO_DRAFTING
    drafts, min_chance = best_drafts(view, decode_rows, most, budget)
    num_free = rows.num_slots[decode_rows] + block_size * np.isin(decode_rows, growing_rows) - positions - 1
    lacking = _blocks(drafts - num_free, block_size)
    drafts = np.where(np.cumsum(lacking) <= num_spare_blocks, drafts, np.minimum(drafts, num_free))
    drafts = budget.add_drafts(positions, drafts, view.speculation.round_ns).astype(np.int32)
    if not np.count_nonzero(drafts):
        return NO_DRAFTING
    predicted_ns = budget.predicted_ns()
    longest_ns = predicted_ns + plain_ns if drafts.all() else _MAX_SLOWDOWN * plain_ns
    spare_ns = max(0, int(min(longest_ns, budget.target_ns)) - predicted_ns)
    return DraftPlan(drafts, min_chance, spare_ns, np.repeat(decode_rows, _blocks(drafts - num_free, block_size)))


def best_drafts(
    view: ExecutorView, decode_rows: RowIndex, most: Int32Array, budget: StepBudget
) -> tuple[Int32Array, float]:
    """`most` is above 0 for one row at least. Also returns how likely a draft must be right to pay, from 0 to 1."""
    num_places = int(most.max())
    if view.speculation.is_plain_due:
        return np.zeros_like(most), 0.0
    place, positions = np.arange(num_places), view.rows.num_scheduled[decode_rows]
    costs = budget.draft_costs(positions, num_places)
    acceptance = view.speculation.acceptance
    least = costs[:, 0] * (len(decode_rows) / budget.predicted_ns())
    if not np.count_nonzero(acceptance.survival(decode_rows, 1)[:, 0] > least):
        return np.zeros_like(most), 0.0  # waiting for any costs more than it brings
    gains = acceptance.survival(decode_rows, num_places)
    gains[place >= most[:, np.newaxis]] = 0.0
    # Its time would bring tokens as fast as drafts do.
    worth = float(least.mean()) * max(1.0, view.speculation.speedup)
    min_chance = round(_CHANCE_STEPS * min(1.0, worth)) / _CHANCE_STEPS
    return most_per_time(gains, costs, view.speculation.round_ns, budget), min_chance


def most_per_time(gains: Float64Array, costs: Float64Array, round_ns: float, budget: StepBudget) -> Int32Array:
    """`gains` [num_rows, num_places] are tokens, 0 where a row may draft no further; `costs` of that shape nanoseconds.
    A row's later drafts gain no more than its earlier ones, for no less. `budget` holds the step without drafts.
    """
    num_rows, num_places = gains.shape
    density = np.divide(gains, costs, out=np.full_like(gains, np.inf), where=costs > 0).ravel()
    # Stable: a row's earlier place comes first.
    order = np.argsort(-density, kind="stable")
    order = order[gains.ravel()[order] > 0]
    plain_ns = float(budget.predicted_ns())
    best, best_rate = order[:0], num_rows / plain_ns
    for depth in range(1, num_places + 1) if round_ns > 0 else (num_places,):
        chosen = order[order % num_places < depth]
        times = plain_ns + round_ns * depth + np.cumsum(costs.ravel()[chosen])
        rates = (num_rows + np.cumsum(gains.ravel()[chosen])) / times
        rates[~_allowed(chosen, times, num_rows, num_places, plain_ns, budget)] = 0.0
        at = int(rates.argmax()) if len(rates) else 0
        if len(rates) and rates[at] > best_rate:
            best, best_rate = chosen[: at + 1], float(rates[at])
    return np.bincount(best // num_places, minlength=num_rows).astype(np.int32)


def _allowed(
    chosen: RowIndex, times: Float64Array, num_rows: int, num_places: int, plain_ns: float, budget: StepBudget
) -> npt.NDArray[np.bool_]:
    all_draft = np.cumsum(chosen % num_places == 0) == num_rows
    is_short = (times <= _MAX_SLOWDOWN * plain_ns) | all_draft
    is_within: npt.NDArray[np.bool_] = is_short & (times <= budget.target_ns)
    is_within[max(0, budget.room) :] = False
    return is_within


def _blocks(num_slots: Int32Array, block_size: int) -> Int32Array:
    blocks: Int32Array = -(-np.maximum(num_slots, 0) // block_size)
    return blocks

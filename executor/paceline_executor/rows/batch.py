"""From an applied plan to the batch the runner computes. Changes nothing.

Counts are bounds: what rows come to if the steps in flight bring all they may.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.plan.values import BatchPlan
from paceline_executor.limits import RowLimits
from paceline_executor.rows.columns import NOT_ASKED, RowArrays
from paceline_executor.rows.forms import RowForm
from paceline_executor.runner.interface import (
    NO_CELLS,
    NOTHING_DESCRIBED,
    BlockCells,
    ForcedDrafts,
    HostTokenLists,
    Int32Array,
    PromptTargets,
    RowDescriptions,
    SamplingColumns,
    StepBatch,
)
from paceline_executor.runner.row_rules import RowRules

MAX_FORCED_TOKENS = 32  # of a row: of the steps in flight, too
_MAX_INT32 = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True)
class Prepared:
    """Rows of the plan that had ended are not in the batch."""

    batch: StepBatch
    places: npt.NDArray[np.intp]  # [num_rows]: places in the plan's columns
    num_draws: Int32Array  # [num_sampled]: tokens that each may get

    @property
    def rows(self) -> Int32Array:
        return self.batch.rows

    @property
    def num_tokens(self) -> Int32Array:
        return self.batch.num_tokens


def prepare(
    columns: RowArrays,
    rules: Mapping[int, RowRules],
    forms: Mapping[int, RowForm],
    plan: BatchPlan,
    places: npt.NDArray[np.intp],
    limits: RowLimits,
) -> Prepared:
    """rules, forms: by row, where any. places: those in the plan's columns of the rows that have not ended."""
    rows, num_tokens = plan.rows[places], plan.num_scheduled_tokens[places]
    known, num_drafts = columns.known_bound[rows], granted_drafts(plan, places, limits)
    if plan.num_draft_tokens.size:
        num_tokens = num_tokens - plan.num_draft_tokens[places]
    if num_drafts is not None:
        fragile = [row for row, form in forms.items() if form.is_fragile]
        num_drafts = np.where(np.isin(rows, fragile), 0, num_drafts) if fragile else num_drafts
        num_tokens, known = num_tokens + num_drafts, known + num_drafts
    context_lens = columns.computed_bound[rows] + num_tokens
    sampled = np.flatnonzero(context_lens == known).astype(np.int32)
    num_draws = np.ones(sampled.size, dtype=np.int32)
    is_masked = bool(forms) and not forms.keys().isdisjoint(rows[sampled].tolist())
    if num_drafts is not None:
        num_drafts = num_drafts[sampled]
        num_draws += num_drafts
    forced = None if num_drafts is None or not is_masked else _forced(columns, forms, rows[sampled], num_drafts)
    batch = StepBatch(
        rows=rows,
        num_tokens=num_tokens,
        context_lens=context_lens,
        sampled=sampled,
        described=_described(columns, rules, rows[~columns.is_told[rows]]),
        cells=_untold_cells(columns, rows),
        prompt_targets=_prompt_targets(columns, rows, context_lens),
        num_drafts=num_drafts,
        min_draft_chance=plan.min_draft_chance,
        draft_spare_ns=plan.draft_spare_ns,
        is_masked=is_masked,
        forced=forced,
    )
    return Prepared(batch, places, num_draws)


def granted_drafts(plan: BatchPlan, places: npt.NDArray[np.intp], limits: RowLimits) -> Int32Array | None:
    """How many may be found for each of the rows at `places`, if any."""
    if not plan.num_draft_tokens.any():
        return None
    wanted, room = plan.num_draft_tokens[places], limits.max_draws - places.size
    granted: Int32Array = wanted - np.clip(np.cumsum(wanted, dtype=np.int32) - room, 0, wanted)
    return granted if granted.any() else None


def _forced(
    columns: RowArrays, forms: Mapping[int, RowForm], rows: Int32Array, num_drafts: Int32Array
) -> ForcedDrafts | None:
    """Behind the tokens that are known, which may be more when the drafts are wanted."""
    found: dict[int, Int32Array] = {}
    for row in rows[num_drafts > 0].tolist():
        if row in forms:
            found[row] = forms[row].forced_at(columns.output_of(row))[:MAX_FORCED_TOKENS]
    forced = np.array([row for row, token_ids in found.items() if token_ids.size], dtype=np.int32)
    if not forced.size:
        return None
    token_ids = HostTokenLists.of([found[row] for row in forced.tolist()])
    return ForcedDrafts(forced, columns.num_known[forced], token_ids)


def _described(columns: RowArrays, rules: Mapping[int, RowRules], rows: Int32Array) -> RowDescriptions:
    if not rows.size:
        return NOTHING_DESCRIBED
    known = zip(rows.tolist(), columns.num_known[rows].tolist(), strict=True)
    return RowDescriptions(
        rows=rows,
        num_prompt=columns.num_prompt[rows],
        num_computed=columns.num_computed[rows],
        max_known=np.minimum(columns.max_known[rows], _MAX_INT32).astype(np.int32),
        end_token_ids=columns.end_tokens[rows, : columns.max_end_tokens],
        sampling=SamplingColumns(
            temperature=columns.temperature[rows],
            top_k=columns.top_k[rows],
            top_p=columns.top_p[rows],
            min_p=columns.min_p[rows],
            seeds=columns.seed[rows],
            offsets=np.zeros_like(rows),
            num_logprobs=columns.num_logprobs[rows],
        ),
        rules=tuple(rules.get(row) for row in rows.tolist()),
        known=HostTokenLists.of([columns.tokens[row, :num_known] for row, num_known in known]),
    )


def _untold_cells(columns: RowArrays, rows: Int32Array) -> BlockCells:
    """Returns the cells behind the ones told."""
    first = np.where(columns.is_told[rows], columns.told_blocks[rows], 0)
    counts = columns.num_blocks[rows] - first
    if not counts.any():
        return NO_CELLS
    cell_rows = np.repeat(rows, counts)
    indices = np.arange(cell_rows.size, dtype=np.int32) + np.repeat(first - (np.cumsum(counts) - counts), counts)
    return BlockCells(cell_rows, indices.astype(np.int32), columns.block_table[cell_rows, indices])


def _prompt_targets(columns: RowArrays, rows: Int32Array, context_lens: Int32Array) -> PromptTargets | None:
    """Those after the tokens computed now, of rows that want their log-probabilities."""
    num_top = columns.num_prompt_logprobs[rows]
    if not (num_top != NOT_ASKED).any():
        return None
    starts = columns.computed_bound[rows]
    num_tokens = np.minimum(context_lens, columns.num_prompt[rows] - 1) - starts
    asked = np.flatnonzero((num_top != NOT_ASKED) & (num_tokens > 0)).astype(np.int32)
    if not asked.size:
        return None
    following = [columns.tokens[rows[i], starts[i] + 1 : starts[i] + 1 + num_tokens[i]] for i in asked]
    return PromptTargets(asked, num_tokens[asked], num_top[asked], np.concatenate(following))

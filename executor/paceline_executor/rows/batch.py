"""From an applied plan to the batch the runner computes. Changes nothing.

Positions and counts are bounds: what rows come to if the steps in flight bring all they may. A row that brings less has
ended, and then the device computes nothing for it. Drafts lie behind a row's known tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from paceline.plan.values import BatchPlan
from paceline_executor.rows.columns import NOT_ASKED, RowColumns
from paceline_executor.runner.interface import (
    UNKNOWN_TOKEN,
    BlockCells,
    CarriedRows,
    Int32Array,
    PromptTargets,
    RowDescriptions,
    SamplingColumns,
    StepBatch,
    TokenLists,
)
from paceline_executor.runner.row_rules import NO_TOKENS, RowRules
from paceline_executor.runner.rule_columns import Ruled, rule_columns

_MAX_INT32 = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True)
class Prepared:
    """Rows of the plan that had ended are not in the batch."""

    batch: StepBatch
    rows: Int32Array  # [num_running]: the row of each batch row
    places: npt.NDArray[np.intp]  # [num_running]: places in the plan's columns
    num_tokens: Int32Array  # [num_running]
    num_draws: Int32Array  # [num_sampled]: tokens that each may get
    max_drawn: int  # all of them together
    is_ahead: bool  # launched before the outcomes of all steps before were known


@dataclass(frozen=True, slots=True)
class _Draws:
    """Behind the known tokens of every sampled row, and behind each draft."""

    rows: Int32Array  # [num_draws]
    num_before: Int32Array  # [num_draws]: drafts of the row
    num_draws: Int32Array  # [num_sampled]
    num_drafts: Int32Array | None  # [num_sampled]; None where no row has any

    @classmethod
    def of(cls, sampled_rows: Int32Array, num_drafts: Int32Array | None) -> "_Draws":
        num_draws = np.ones(sampled_rows.size, dtype=np.int32)
        if num_drafts is None:
            return cls(sampled_rows, np.zeros_like(num_draws), num_draws, None)
        num_draws += num_drafts
        first = np.cumsum(num_draws, dtype=np.int32) - num_draws
        num_before = np.arange(num_draws.sum(), dtype=np.int32) - np.repeat(first, num_draws)
        return cls(np.repeat(sampled_rows, num_draws), num_before, num_draws, num_drafts)


def prepare(
    columns: RowColumns,
    rules: Mapping[int, RowRules],
    plan: BatchPlan,
    places: npt.NDArray[np.intp],
    num_drafts: Int32Array | None,
    *,
    is_carried: bool,
    is_ahead: bool,
    is_drafting: bool = False,
) -> Prepared:
    """rules: by row, where any. places: those in the plan's columns of the rows that have not ended. num_drafts:
    theirs, if any has. is_carried: for a device that keeps rows. is_ahead: whether steps are in flight. is_drafting: by
    the device.
    """
    rows, num_tokens = plan.rows, plan.num_scheduled_tokens
    if plan.num_draft_tokens.size:
        num_tokens = num_tokens - plan.num_draft_tokens
    if places.size < rows.size:
        rows, num_tokens = rows[places], num_tokens[places]
    known = columns.known_bound[rows]
    if num_drafts is not None:
        num_tokens, known = num_tokens + num_drafts, known + num_drafts
    starts = columns.computed_bound[rows]
    context_lens = starts + num_tokens
    cu_seqlens = np.zeros(rows.size + 1, dtype=np.int32)
    np.cumsum(num_tokens, out=cu_seqlens[1:])
    positions = np.arange(cu_seqlens[-1], dtype=np.int32) + np.repeat(starts - cu_seqlens[:-1], num_tokens)
    token_rows = np.repeat(rows, num_tokens)
    token_ids = columns.tokens[token_rows, positions]
    sampled = np.flatnonzero(context_lens == known).astype(np.int32)
    draws = _Draws.of(rows[sampled], None if num_drafts is None else num_drafts[sampled])
    carried, num_table_blocks = None, -(-int(context_lens.max(initial=0)) // columns.block_size)
    sampling = sampling_columns(columns, draws.rows, draws.num_before)
    if is_carried:
        carried, num_table_blocks = _carried(columns, rules, rows, is_drafting=is_drafting), 0
        token_ids[positions >= columns.num_known[token_rows]] = UNKNOWN_TOKEN
    elif rules:
        sampling = replace(sampling, rules=rule_columns(_ruled(columns, rules, draws)))
    batch = StepBatch(
        token_ids=token_ids,
        positions=positions,
        cu_seqlens=cu_seqlens,
        context_lens=context_lens,
        block_tables=columns.block_table[rows, :num_table_blocks],
        sampled=sampled,
        sampling=sampling,
        prompt_targets=_prompt_targets(columns, rows, context_lens),
        carried=carried,
        num_drafts=draws.num_drafts,
        min_draft_chance=plan.min_draft_chance,
    )
    return Prepared(batch, rows, places, num_tokens, draws.num_draws, draws.rows.size, is_ahead)


def sampling_columns(columns: RowColumns, rows: Int32Array, num_before: Int32Array | int = 0) -> SamplingColumns:
    """num_before: drafts before the draw."""
    return SamplingColumns(
        temperature=columns.temperature[rows],
        top_k=columns.top_k[rows],
        top_p=columns.top_p[rows],
        min_p=columns.min_p[rows],
        seeds=columns.seed[rows],
        offsets=columns.known_bound[rows] - columns.num_prompt[rows] + num_before,
        num_logprobs=columns.num_logprobs[rows],
    )


def _ruled(columns: RowColumns, rules: Mapping[int, RowRules], draws: _Draws) -> list[Ruled | None]:
    """Nothing is in flight of these rows. Each rule comes with the output and the drafts before it."""
    ruled = []
    for row, num_before in zip(draws.rows.tolist(), draws.num_before.tolist(), strict=True):
        mine = rules.get(row)
        output = columns.tokens[row, columns.num_prompt[row] : columns.num_known[row] + num_before]
        ruled.append(None if mine is None else Ruled(mine, output))
    return ruled


def _carried(columns: RowColumns, rules: Mapping[int, RowRules], rows: Int32Array, *, is_drafting: bool) -> CarriedRows:
    """The device has not been told this of the rows."""
    untold = rows[~columns.is_told[rows]]
    described = _described(columns, rules, untold, with_history=is_drafting)
    return CarriedRows(rows, described, _untold_cells(columns, rows))


def _described(
    columns: RowColumns, rules: Mapping[int, RowRules], rows: Int32Array, *, with_history: bool
) -> RowDescriptions:
    mine = [rules.get(row) for row in rows.tolist()]
    histories = [
        columns.tokens[row, : columns.num_known[row]]
        if with_history or (of_row is not None and of_row.needs_output)
        else NO_TOKENS
        for row, of_row in zip(rows.tolist(), mine, strict=True)
    ]
    return RowDescriptions(
        rows=rows,
        num_prompt=columns.num_prompt[rows],
        num_known=columns.num_known[rows],
        num_computed=columns.num_computed[rows],
        max_known=np.minimum(columns.max_known[rows], _MAX_INT32).astype(np.int32),
        end_token_ids=columns.end_tokens[rows, : columns.max_end_tokens],
        sampling=sampling_columns(columns, rows),
        rules=tuple(mine),
        history=TokenLists.of(histories),
    )


def _untold_cells(columns: RowColumns, rows: Int32Array) -> BlockCells:
    """Returns the cells behind the ones told."""
    first = np.where(columns.is_told[rows], columns.told_blocks[rows], 0)
    counts = columns.num_blocks[rows] - first
    cell_rows = np.repeat(rows, counts)
    indices = np.arange(cell_rows.size, dtype=np.int32) + np.repeat(first - (np.cumsum(counts) - counts), counts)
    return BlockCells(cell_rows, indices.astype(np.int32), columns.block_table[cell_rows, indices])


def _prompt_targets(columns: RowColumns, rows: Int32Array, context_lens: Int32Array) -> PromptTargets | None:
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

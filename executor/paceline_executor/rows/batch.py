"""From an applied plan to the batch the runner computes. Reads the columns, changes nothing.

Positions and counts are bounds: what rows come to if the steps in flight bring all they may. A row that brings less has
ended, and then the device computes nothing for it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.plan.values import BatchPlan
from paceline_executor.rows.columns import NOT_ASKED, RowColumns
from paceline_executor.rows.rules import RowRules, rule_columns
from paceline_executor.runner.interface import (
    UNKNOWN_TOKEN,
    CarriedRows,
    Int32Array,
    PromptTargets,
    SamplingColumns,
    StepBatch,
)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A step's batch, and which rows of the plan are in it: the others had ended."""

    batch: StepBatch
    rows: Int32Array  # [num_running]: the row of each batch row
    places: npt.NDArray[np.intp]  # [num_running]: the place of each batch row in the plan's columns
    num_tokens: Int32Array  # [num_running]
    num_draws: Int32Array  # [num_sampled]: how many tokens each may get
    max_drawn: int  # all of them together
    is_ahead: bool  # it was launched before the outcomes of all steps before it were known


def prepare(
    columns: RowColumns,
    rules: Mapping[int, RowRules],
    plan: BatchPlan,
    places: npt.NDArray[np.intp],
    is_open: npt.NDArray[np.bool_] | None,
) -> Prepared:
    """The batch of a checked plan. rules: by row, where any. places: those in the plan's columns of the rows that have
    not ended. is_open: for a device that carries rows, whether each row of the executor is in a step in flight; else
    None.
    """
    rows, num_tokens = plan.rows, plan.num_scheduled_tokens
    if places.size < rows.size:
        rows, num_tokens = rows[places], num_tokens[places]
    starts = columns.computed_bound[rows]
    context_lens = starts + num_tokens
    cu_seqlens = np.zeros(rows.size + 1, dtype=np.int32)
    np.cumsum(num_tokens, out=cu_seqlens[1:])
    positions = np.arange(cu_seqlens[-1], dtype=np.int32) + np.repeat(starts - cu_seqlens[:-1], num_tokens)
    token_rows = np.repeat(rows, num_tokens)
    token_ids = columns.tokens[token_rows, positions]
    sampled = np.flatnonzero(context_lens == columns.known_bound[rows]).astype(np.int32)
    carried, is_ahead = None, False
    if is_open is not None:
        carried = CarriedRows(rows, is_open[rows], columns.end_tokens[rows[sampled], : columns.max_end_tokens])
        is_ahead = bool(is_open.any())
        token_ids[positions >= columns.num_known[token_rows]] = UNKNOWN_TOKEN
    num_table_blocks = -(-int(context_lens.max(initial=0)) // columns.block_size)
    batch = StepBatch(
        token_ids=token_ids,
        positions=positions,
        cu_seqlens=cu_seqlens,
        context_lens=context_lens,
        block_tables=columns.block_table[rows, :num_table_blocks],
        sampled=sampled,
        sampling=_sampling(columns, rules, rows[sampled]),
        prompt_targets=_prompt_targets(columns, rows, context_lens),
        carried=carried,
    )
    return Prepared(batch, rows, places, num_tokens, np.ones(sampled.size, dtype=np.int32), sampled.size, is_ahead)


def _sampling(columns: RowColumns, rules: Mapping[int, RowRules], rows: Int32Array) -> SamplingColumns:
    return SamplingColumns(
        temperature=columns.temperature[rows],
        top_k=columns.top_k[rows],
        top_p=columns.top_p[rows],
        min_p=columns.min_p[rows],
        seeds=columns.seed[rows],
        offsets=columns.known_bound[rows] - columns.num_prompt[rows],
        num_logprobs=columns.num_logprobs[rows],
        rules=rule_columns(rules, columns, rows),
    )


def _prompt_targets(columns: RowColumns, rows: Int32Array, context_lens: Int32Array) -> PromptTargets | None:
    """The prompt tokens after those computed now, of rows that want their log-probabilities."""
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

"""From an applied plan to the batch the runner computes. Reads the columns, changes nothing."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.plan.values import BatchPlan
from paceline_executor.rows.columns import GOES_ON, NOT_ASKED, RowColumns
from paceline_executor.rows.rules import RowRules, rule_columns
from paceline_executor.runner.interface import Int32Array, PromptTargets, SamplingColumns, StepBatch


@dataclass(frozen=True, slots=True)
class Prepared:
    """A step's batch, and which rows of the plan are in it: the others had ended."""

    batch: StepBatch
    rows: Int32Array  # [num_running]: the row of each batch row
    places: npt.NDArray[np.intp]  # [num_running]: the place of each batch row in the plan's columns
    num_tokens: Int32Array  # [num_running]


def prepare(columns: RowColumns, rules: Mapping[int, RowRules], plan: BatchPlan) -> Prepared:
    """The batch of a plan that has passed the checks; rows that ended are left out, so nothing is written for them.

    rules: by row, of those that have any.
    """
    places = np.flatnonzero(columns.finish[plan.rows] == GOES_ON)
    rows, num_tokens = plan.rows[places], plan.num_scheduled_tokens[places]
    starts = columns.num_computed[rows]
    context_lens = starts + num_tokens
    cu_seqlens = np.zeros(rows.size + 1, dtype=np.int32)
    np.cumsum(num_tokens, out=cu_seqlens[1:])
    positions = np.arange(cu_seqlens[-1], dtype=np.int32) + np.repeat(starts - cu_seqlens[:-1], num_tokens)
    sampled = np.flatnonzero(context_lens == columns.num_known[rows]).astype(np.int32)
    num_table_blocks = -(-int(context_lens.max(initial=0)) // columns.block_size)
    batch = StepBatch(
        token_ids=columns.tokens[np.repeat(rows, num_tokens), positions],
        positions=positions,
        cu_seqlens=cu_seqlens,
        context_lens=context_lens,
        block_tables=columns.block_table[rows, :num_table_blocks],
        sampled=sampled,
        sampling=_sampling(columns, rules, rows[sampled]),
        prompt_targets=_prompt_targets(columns, rows, context_lens),
    )
    return Prepared(batch, rows, places, num_tokens)


def _sampling(columns: RowColumns, rules: Mapping[int, RowRules], rows: Int32Array) -> SamplingColumns:
    return SamplingColumns(
        temperature=columns.temperature[rows],
        top_k=columns.top_k[rows],
        top_p=columns.top_p[rows],
        min_p=columns.min_p[rows],
        seeds=columns.seed[rows],
        offsets=columns.num_known[rows] - columns.num_prompt[rows],
        num_logprobs=columns.num_logprobs[rows],
        rules=rule_columns(rules, columns, rows),
    )


def _prompt_targets(columns: RowColumns, rows: Int32Array, context_lens: Int32Array) -> PromptTargets | None:
    """The prompt tokens that follow what is computed now, of rows that asked for their log-probabilities."""
    num_top = columns.num_prompt_logprobs[rows]
    if not (num_top != NOT_ASKED).any():
        return None
    starts = columns.num_computed[rows]
    num_tokens = np.minimum(context_lens, columns.num_prompt[rows] - 1) - starts
    asked = np.flatnonzero((num_top != NOT_ASKED) & (num_tokens > 0)).astype(np.int32)
    if not asked.size:
        return None
    following = [columns.tokens[rows[i], starts[i] + 1 : starts[i] + 1 + num_tokens[i]] for i in asked]
    return PromptTargets(asked, num_tokens[asked], num_top[asked], np.concatenate(following))

"""From the runner's output to rows that advanced and a result that says so.

Three steps: `draw` reads and checks, `advance` writes, `report` tells. Only `advance` changes anything, and nothing in
it can fail half-way.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline_executor.errors import NumericError
from paceline_executor.rows.batch import Prepared
from paceline_executor.rows.columns import RowColumns
from paceline_executor.rows.plan import Plan, RowFault, RowFinish, RowLogprobs, StepResult
from paceline_executor.runner.interface import Int32Array, StepOutput


@dataclass(frozen=True, slots=True)
class Drawn:
    """The tokens a step produced, one for each of `rows`, and the rows that failed instead."""

    rows: Int32Array  # [num_drawn]
    places: npt.NDArray[np.intp]  # [num_drawn]: places in the plan's columns
    token_ids: Int32Array  # [num_drawn]
    logprobs: tuple[RowLogprobs, ...]
    faults: tuple[RowFault, ...]


def draw(prepared: Prepared, output: StepOutput) -> Drawn:
    """Sort a step's output by row. Raises ValueError when it does not fit the batch.

    A row that asked for log-probabilities has them for each of its tokens, no other row has any.
    """
    sampled = prepared.batch.sampled
    if output.token_ids.shape != sampled.shape:
        raise ValueError(f"{sampled.size} rows are sampled and the runner answered {output.token_ids.shape}")
    has_token = np.ones(sampled.size, dtype=np.bool_)
    has_token[list(output.faults)] = False
    asked = np.flatnonzero(has_token & (prepared.batch.sampling.num_logprobs >= 0)).tolist()
    if not output.logprobs.keys() >= set(asked):
        raise ValueError("the runner left out log-probabilities that were asked for")
    rows = prepared.rows[sampled]
    return Drawn(
        rows=rows[has_token],
        places=prepared.places[sampled][has_token],
        token_ids=output.token_ids[has_token],
        logprobs=tuple(
            RowLogprobs(int(rows[index]), int(output.token_ids[index]), output.logprobs[index]) for index in asked
        ),
        faults=tuple(RowFault(int(rows[index]), NumericError(why)) for index, why in sorted(output.faults.items())),
    )


def advance(columns: RowColumns, max_model_len: int, prepared: Prepared, drawn: Drawn) -> None:
    """Count what was computed, append what was drawn, end the rows that are done."""
    columns.num_computed[prepared.rows] += prepared.num_tokens
    rows, token_ids = drawn.rows, drawn.token_ids
    columns.tokens[rows, columns.num_known[rows]] = token_ids
    columns.num_known[rows] += 1
    num_known = columns.num_known[rows]
    end_tokens = columns.end_tokens[rows, : columns.max_end_tokens]
    # The later reason is the one that counts.
    columns.finish[rows[num_known >= max_model_len]] = RowFinish.CONTEXT_FULL
    columns.finish[rows[num_known >= columns.max_known[rows]]] = RowFinish.LENGTH
    columns.finish[rows[(end_tokens == token_ids[:, None]).any(axis=1)]] = RowFinish.END_TOKEN
    for fault in drawn.faults:
        columns.finish[fault.row] = RowFinish.ERROR


def report(
    columns: RowColumns, plan: Plan, placement_faults: tuple[RowFault, ...], drawn: Drawn, grant_hash: int
) -> StepResult:
    """The result of a step whose rows have advanced."""
    num_accepted = np.zeros(plan.rows.size, dtype=np.int32)
    num_accepted[drawn.places] = 1
    return StepResult(
        epoch=plan.epoch,
        step_id=plan.step_id,
        rows=plan.rows,
        num_accepted=num_accepted,
        token_ids=drawn.token_ids,
        finishes=columns.finish[plan.rows],
        logprobs=drawn.logprobs,
        faults=placement_faults + drawn.faults,
        grant_hash=grant_hash,
    )

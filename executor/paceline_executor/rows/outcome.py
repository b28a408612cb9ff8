"""From the runner's output to rows that advanced and a result that says so.

Three steps: `draw` reads and checks, `advance` writes, `report` tells. Only `advance` changes anything, and nothing in
it can fail half-way.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.plan.values import BatchPlan, LogprobColumns, RowError, RowFinish, RowLogprobs, StepResult
from paceline_executor.errors import NoTokenLeftError, NumericError, RequestError
from paceline_executor.rows.batch import Prepared
from paceline_executor.rows.columns import RowColumns
from paceline_executor.runner.interface import Int32Array, RowProblem, StepOutput, TokenLogprobs

_ERRORS: dict[RowProblem, tuple[type[RequestError], str]] = {
    RowProblem.NOT_FINITE: (NumericError, "the model's logits are not finite numbers"),
    RowProblem.NOTHING_LEFT: (
        NoTokenLeftError,
        "no token is left to draw: allowed_token_ids, bad_words and min_tokens together exclude every one",
    ),
}


@dataclass(frozen=True, slots=True)
class Drawn:
    """The tokens a step produced, one for each of `rows`, and the rows that failed instead."""

    rows: Int32Array  # [num_drawn]
    places: npt.NDArray[np.intp]  # [num_drawn]: places in the plan's columns
    token_ids: Int32Array  # [num_drawn]
    logprobs: tuple[RowLogprobs, ...]
    errors: tuple[RowError, ...]
    prompt_logprobs: tuple[RowLogprobs, ...]


def draw(prepared: Prepared, output: StepOutput) -> Drawn:
    """Sort a step's output by row. Raises ValueError when it does not fit the batch.

    A row that asked for log-probabilities has them for each of its tokens, no other row has any.
    """
    sampled = prepared.batch.sampled
    if output.token_ids.shape != sampled.shape:
        raise ValueError(f"{sampled.size} rows are sampled and the runner answered {output.token_ids.shape}")
    has_token = ~np.isin(sampled, list(output.problems)) if output.problems else np.ones(sampled.size, dtype=np.bool_)
    asked = np.flatnonzero(has_token & (prepared.batch.sampling.num_logprobs >= 0)).tolist()
    if not output.logprobs.keys() >= set(asked):
        raise ValueError("the runner left out log-probabilities that were asked for")
    rows = prepared.rows[sampled]
    return Drawn(
        rows=rows[has_token],
        places=prepared.places[sampled][has_token],
        token_ids=output.token_ids[has_token],
        logprobs=tuple(
            _row_logprobs(int(rows[index]), output.token_ids[index : index + 1], output.logprobs[index])
            for index in asked
        ),
        errors=tuple(_problem(int(prepared.rows[index]), output.problems[index]) for index in sorted(output.problems)),
        prompt_logprobs=_prompt_logprobs(prepared, output),
    )


def row_error(row: int, error: RequestError) -> RowError:
    """What is said of a row that failed alone."""
    return RowError(row, error.code, error.reason, str(error), error.field)


def _problem(row: int, problem: RowProblem) -> RowError:
    error, sentence = _ERRORS[problem]
    return row_error(row, error(sentence))


def _row_logprobs(row: int, token_ids: Int32Array, values: TokenLogprobs) -> RowLogprobs:
    columns = LogprobColumns(
        offset=0,
        logprobs=np.array([values.chosen], dtype=np.float32),
        top_token_ids=np.array([values.top_token_ids], dtype=np.int32).reshape(1, -1),
        top_logprobs=np.array([values.top_logprobs], dtype=np.float32).reshape(1, -1),
    )
    return RowLogprobs(row, token_ids, columns)


def _prompt_logprobs(prepared: Prepared, output: StepOutput) -> tuple[RowLogprobs, ...]:
    """Those of the batch's targets; raises ValueError where they are missing or of another number."""
    targets = prepared.batch.prompt_targets
    if targets is None:
        return ()
    told, start = [], 0
    for index, num_tokens in zip(targets.rows.tolist(), targets.num_tokens.tolist(), strict=True):
        token_ids = targets.token_ids[start : start + num_tokens]
        start += num_tokens
        if index in output.problems:
            continue
        values = output.prompt_logprobs.get(index)
        if values is None or values.logprobs.shape != (num_tokens,):
            raise ValueError("the runner left out log-probabilities of a prompt")
        position = int(prepared.batch.positions[prepared.batch.cu_seqlens[index]]) + 1
        columns = LogprobColumns(position, values.logprobs, values.top_token_ids, values.top_logprobs)
        told.append(RowLogprobs(int(prepared.rows[index]), token_ids, columns))
    return tuple(told)


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
    for error in drawn.errors:
        columns.finish[error.row] = RowFinish.ERROR


def report(
    columns: RowColumns, plan: BatchPlan, placement_errors: tuple[RowError, ...], drawn: Drawn, grant_hash: int
) -> StepResult:
    """The result of a step whose rows have advanced."""
    num_accepted = np.zeros(plan.rows.size, dtype=np.int32)
    num_accepted[drawn.places] = 1
    return StepResult(
        incarnation=plan.incarnation,
        epoch=plan.epoch,
        step_id=plan.step_id,
        rows=plan.rows,
        num_accepted=num_accepted,
        token_ids=drawn.token_ids,
        finishes=columns.finish[plan.rows],
        logprobs=drawn.logprobs,
        errors=placement_errors + drawn.errors,
        grant_hash=grant_hash,
        prompt_logprobs=drawn.prompt_logprobs,
    )

"""From the runner's output to rows that advanced and a result that says so.

`draw` reads and checks, `advance` writes, `report` tells, `settle` lowers the bounds. Nothing in `advance` and `settle`
can fail half-way.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from paceline.plan.values import BatchPlan, LogprobColumns, RowError, RowFinish, RowLogprobs, StepResult
from paceline_executor.errors import NoTokenLeftError, NumericError, RequestError, StructuredFailedError
from paceline_executor.rows.batch import Prepared
from paceline_executor.rows.columns import GOES_ON, RowArrays
from paceline_executor.rows.logprobs import LogprobLog
from paceline_executor.runner.interface import BoolArray, Int32Array, RowProblem, StepOutput

_ERRORS: dict[RowProblem, tuple[type[RequestError], str]] = {
    RowProblem.NOT_FINITE: (NumericError, "the model's logits are not finite numbers"),
    RowProblem.NOTHING_LEFT: (
        NoTokenLeftError,
        "no token is left to draw: allowed_token_ids, bad_words, min_tokens and the output's form together exclude "
        "every one",
    ),
    RowProblem.FORM: (StructuredFailedError, "the form of the output takes more than a step may; make it simpler"),
}


@dataclass(frozen=True, slots=True)
class Drawn:
    """The tokens of `rows` one after another, and the rows that failed instead."""

    num_computed: Int32Array  # [num_running]
    num_missing: Int32Array  # [num_sampled] of the tokens that each might have got
    rows: Int32Array  # [num_drawn]
    places: npt.NDArray[np.intp]  # [num_drawn]: in the plan's columns
    num_accepted: Int32Array  # [num_drawn], at least 1
    num_drafts: Int32Array  # [num_drawn] that were verified
    token_ids: Int32Array  # [sum(num_accepted)]
    logprobs: tuple[RowLogprobs, ...]
    errors: tuple[RowError, ...]
    prompt_logprobs: tuple[RowLogprobs, ...]


def judged(
    prepared: Prepared, output: StepOutput, undrawn: Set[int], failed_forms: Set[int]
) -> tuple[StepOutput, npt.NDArray[np.intp]]:
    """Masks without a token left nothing: of rows that draw nothing yet this is no problem, of those whose form failed
    it is another. undrawn, failed_forms: rows. Returns also the batch rows that draw nothing.
    """
    if not undrawn and not failed_forms:
        return output, np.empty(0, dtype=np.intp)
    problems = dict(output.problems)
    for index, problem in output.problems.items():
        if problem is RowProblem.NOTHING_LEFT and int(prepared.rows[index]) in undrawn:
            del problems[index]
        elif problem is RowProblem.NOTHING_LEFT and int(prepared.rows[index]) in failed_forms:
            problems[index] = RowProblem.FORM
    waits = [row in undrawn and index not in problems for index, row in enumerate(prepared.rows.tolist())]
    return replace(output, problems=problems), np.flatnonzero(waits)


def draw(
    columns: RowArrays,
    logs: Mapping[int, LogprobLog],
    prepared: Prepared,
    output: StepOutput,
    undrawn: npt.NDArray[np.intp],
) -> Drawn:
    """Raises ValueError when the output does not fit the batch. logs: by row, of those that want log-probabilities for
    each token. undrawn: batch rows that go on and draw nothing.
    """
    is_live = columns.finish[prepared.rows] == GOES_ON  # others have ended since the launch
    has_tokens = _has_tokens(prepared, output, is_live, undrawn)
    sampled = prepared.batch.sampled[has_tokens]
    rows, num_accepted = prepared.rows[sampled], output.num_accepted[has_tokens]
    num_computed = _num_computed(prepared, output, is_live)
    # Its last known token is computed again, in front of its next draw.
    waiting = prepared.rows[undrawn]
    num_computed[undrawn] = columns.num_known[waiting] - 1 - columns.num_computed[waiting]
    return Drawn(
        num_computed=num_computed,
        num_missing=prepared.num_draws - output.num_accepted,
        rows=rows,
        places=prepared.places[sampled],
        num_accepted=num_accepted,
        num_drafts=_num_verified(prepared, output)[has_tokens],
        token_ids=output.token_ids,
        logprobs=_logprobs(rows, num_accepted, output, logs) if logs else (),
        errors=tuple(_problem(int(prepared.rows[index]), output.problems[index]) for index in sorted(output.problems)),
        prompt_logprobs=_prompt_logprobs(prepared, output, is_live),
    )


def _num_verified(prepared: Prepared, output: StepOutput) -> Int32Array:
    """Raises ValueError for numbers that cannot be."""
    granted = prepared.num_draws - 1
    if output.num_verified is None:
        return granted
    verified, least = output.num_verified, np.maximum(output.num_accepted - 1, 0)
    if verified.shape != granted.shape or (verified > granted).any() or (verified < least).any():
        raise ValueError(f"the runner verified {verified.tolist()} drafts, where rows might have {granted.tolist()}")
    return verified


def _has_tokens(prepared: Prepared, output: StepOutput, is_live: BoolArray, undrawn: npt.NDArray[np.intp]) -> BoolArray:
    """Sampled rows that drew, and neither failed nor had ended. Raises ValueError for other counts."""
    sampled, num_accepted = prepared.batch.sampled, output.num_accepted
    has_tokens = is_live[sampled]
    if undrawn.size:
        has_tokens &= ~np.isin(sampled, undrawn)
    if output.problems:
        has_tokens &= ~np.isin(sampled, list(output.problems))
        if not all(is_live[index] for index in output.problems):
            raise ValueError("the runner names problems of rows that had ended")
    if num_accepted.shape != sampled.shape or output.token_ids.shape != (num_accepted.sum(),):
        shapes = f"{num_accepted.shape} counts and {output.token_ids.shape} tokens"
        raise ValueError(f"{sampled.size} rows are sampled and the runner answered {shapes}")
    if (((num_accepted > 0) != has_tokens) | (num_accepted > prepared.num_draws)).any():
        raise ValueError(f"the runner answered {num_accepted.tolist()} tokens, where each of {has_tokens.tolist()} has")
    return has_tokens


def _num_computed(prepared: Prepared, output: StepOutput, is_live: BoolArray) -> Int32Array:
    """Tokens behind a wrong draft do not count."""
    num_computed = prepared.num_tokens.copy()
    num_computed[prepared.batch.sampled] -= prepared.num_draws - np.maximum(output.num_accepted, 1)
    num_computed[~is_live] = 0
    return num_computed


def _logprobs(
    rows: Int32Array, num_accepted: Int32Array, output: StepOutput, logs: Mapping[int, LogprobLog]
) -> tuple[RowLogprobs, ...]:
    """Raises ValueError where those of rows that want them are missing, or too few."""
    columns, num_tokens = output.logprobs, output.token_ids.size
    asking = [(row, logs.get(row)) for row in rows.tolist()]
    num_top = max((log.num_top for _, log in asking if log is not None), default=-1)
    if num_top < 0:
        return ()
    if columns is None or columns.logprobs.shape != (num_tokens,):
        raise ValueError("the runner left out log-probabilities that were asked for")
    shape = columns.top_token_ids.shape
    if shape != columns.top_logprobs.shape or shape[0] != num_tokens or shape[1] < num_top:
        raise ValueError(f"{num_top} alternatives of {num_tokens} tokens were asked for and {shape} came")
    told, stop = [], 0
    for (row, log), count in zip(asking, num_accepted.tolist(), strict=True):
        start, stop = stop, stop + count
        if log is not None:
            tokens = slice(start, stop)
            values = columns.of(tokens, log.num_top)
            mine = LogprobColumns(0, values.logprobs, values.top_token_ids, values.top_logprobs)
            told.append(RowLogprobs(row, output.token_ids[tokens], mine))
    return tuple(told)


def row_error(row: int, error: RequestError) -> RowError:
    return RowError(row, error.code, error.reason, str(error), error.field)


def _problem(row: int, problem: RowProblem) -> RowError:
    error, sentence = _ERRORS[problem]
    return row_error(row, error(sentence))


def _prompt_logprobs(prepared: Prepared, output: StepOutput, is_live: BoolArray) -> tuple[RowLogprobs, ...]:
    """Raises ValueError where those of the batch's targets are missing or of another number."""
    targets = prepared.batch.prompt_targets
    if targets is None:
        return ()
    told, start = [], 0
    for index, num_tokens in zip(targets.rows.tolist(), targets.num_tokens.tolist(), strict=True):
        token_ids = targets.token_ids[start : start + num_tokens]
        start += num_tokens
        if index in output.problems or not is_live[index]:
            continue
        values = output.prompt_logprobs.get(index)
        if values is None or values.logprobs.shape != (num_tokens,):
            raise ValueError("the runner left out log-probabilities of a prompt")
        start = int(prepared.batch.context_lens[index] - prepared.batch.num_tokens[index])
        columns = LogprobColumns(start + 1, values.logprobs, values.top_token_ids, values.top_logprobs)
        told.append(RowLogprobs(int(prepared.rows[index]), token_ids, columns))
    return tuple(told)


def advance(columns: RowArrays, max_model_len: int, prepared: Prepared, drawn: Drawn) -> None:
    columns.num_computed[prepared.rows] += drawn.num_computed
    rows, num_accepted, token_ids = drawn.rows, drawn.num_accepted, drawn.token_ids
    ends, num_known = num_accepted.cumsum(), columns.num_known[rows] + num_accepted
    places = np.arange(token_ids.size) + (num_known - ends).repeat(num_accepted)
    columns.tokens[rows.repeat(num_accepted), places] = token_ids
    columns.num_known[rows] = num_known
    end_tokens = columns.end_tokens[rows, : columns.max_end_tokens]
    # The later reason is the one that counts.
    columns.finish[rows[num_known >= max_model_len]] = RowFinish.CONTEXT_FULL
    columns.finish[rows[num_known >= columns.max_known[rows]]] = RowFinish.LENGTH
    columns.finish[rows[(end_tokens == token_ids[ends - 1, None]).any(axis=1)]] = RowFinish.END_TOKEN
    for error in drawn.errors:
        columns.finish[error.row] = RowFinish.ERROR


def settle(columns: RowArrays, prepared: Prepared, drawn: Drawn) -> None:
    """Of rows that brought less than they might, in later steps too."""
    columns.computed_bound[prepared.rows] -= prepared.num_tokens - drawn.num_computed
    columns.known_bound[prepared.rows[prepared.batch.sampled]] -= drawn.num_missing


def report(
    columns: RowArrays, plan: BatchPlan, placement_errors: tuple[RowError, ...], drawn: Drawn, grant_hash: int
) -> StepResult:
    num_accepted = np.zeros(plan.rows.size, dtype=np.int32)
    num_accepted[drawn.places] = drawn.num_accepted
    num_drafts = plan.num_draft_tokens
    if num_drafts.size:
        num_drafts = np.zeros_like(num_accepted)
        num_drafts[drawn.places] = drawn.num_drafts
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
        num_draft_tokens=num_drafts,
    )

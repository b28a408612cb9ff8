"""draws for CPUs: numpy over all planned rows at once, in the calling thread. Knows rows, tokens and limits."""

import numpy as np
import numpy.typing as npt
import torch

from paceline_kernels.draws.columns import Advanced, DrawInputs, RowDraws, RowFinish
from paceline_kernels.sampling.columns import SampleOutcome, Samples, SamplingParameters
from paceline_kernels.step_inputs import PlanColumns, RowState, StepInputs

_BoolArray = npt.NDArray[np.bool_]
_IntArray = npt.NDArray[np.integer]


def draw_inputs(
    state: RowState, rows: RowDraws, plan: PlanColumns, batch: StepInputs, num_draws: int, max_drafts: int
) -> DrawInputs:
    planned, goes_on = _planned_rows(state, plan)
    context_lens, known = batch.context_lens.numpy(), rows.num_known.numpy()[planned]
    counts = np.where(goes_on, np.clip(context_lens + 1 - known, 0, max_drafts + 1), 0)
    cu_draws = np.zeros(len(planned) + 1, dtype=np.int32)
    np.minimum(np.cumsum(counts), num_draws, out=cu_draws[1:], casting="unsafe")
    counts, total = np.diff(cu_draws), int(cu_draws[-1])
    of_row = np.repeat(planned, counts)
    position = np.arange(total, dtype=np.int32) + np.repeat(known - cu_draws[:-1], counts)

    def column(of_draws: npt.NDArray[np.generic], padding: float) -> torch.Tensor:
        values = np.full(num_draws, padding, dtype=of_draws.dtype)
        values[:total] = of_draws
        return torch.from_numpy(values)

    def of_rows(values: torch.Tensor, padding: float) -> torch.Tensor:
        return column(values.numpy()[of_row], padding)

    ends = np.repeat(batch.cu_seqlens.numpy()[1:] - context_lens - 1, counts)
    return DrawInputs(
        places=column(ends + position, -1),
        cu_draws=torch.from_numpy(cu_draws),
        rows=column(of_row, -1),
        parameters=SamplingParameters(
            temperature=of_rows(rows.temperature, 0),
            top_k=of_rows(rows.top_k, 0),
            top_p=of_rows(rows.top_p, 1),
            min_p=of_rows(rows.min_p, 0),
            seeds=of_rows(rows.seeds, 0),
            offsets=column(position - rows.num_prompt.numpy()[of_row], 0),
            num_logprobs=of_rows(rows.num_logprobs, -1),
        ),
    )


def advance_rows(
    state: RowState, rows: RowDraws, plan: PlanColumns, batch: StepInputs, draws: DrawInputs, samples: Samples
) -> Advanced:
    planned, goes_on = _planned_rows(state, plan)
    exists = (plan.rows.numpy() >= 0) & (plan.rows.numpy() < state.num_held.shape[0])
    num_accepted = np.zeros(len(planned), dtype=np.int32)
    finish = np.where(exists, state.finish.numpy()[planned], RowFinish.GOES_ON).astype(np.uint8)
    counts = np.where(goes_on, np.diff(draws.cu_draws.numpy()), 0)
    # Of rows that only count what was computed, and of those that draw: the last draw they look at.
    last = np.full(len(planned), -1, dtype=np.int32)
    drawing = np.flatnonzero(counts)
    if len(drawing):
        first = draws.cu_draws.numpy()[drawing]
        taken = _take_draws(state, rows, planned[drawing], first, counts[drawing], samples)
        last[drawing], num_accepted[drawing], finish[drawing] = taken
    on, known = planned[goes_on], rows.num_known.numpy()[planned]
    state.num_computed.numpy()[on] = np.minimum(batch.context_lens.numpy(), known + last)[goes_on]
    state.num_held.numpy()[on] = rows.num_known.numpy()[on] = (known + num_accepted)[goes_on]
    state.finish.numpy()[on] = finish[goes_on]
    return Advanced(torch.from_numpy(num_accepted), torch.from_numpy(finish))


def _planned_rows(state: RowState, plan: PlanColumns) -> tuple[_IntArray, _BoolArray]:
    """The rows of a plan, 0 where it names none, and which of them are rows that go on."""
    planned = plan.rows.numpy()
    exists = (planned >= 0) & (planned < state.num_held.shape[0])
    planned = np.where(exists, planned, 0)
    return planned, exists & (state.finish.numpy()[planned] == RowFinish.GOES_ON)


def _take_draws(
    state: RowState, rows: RowDraws, planned: _IntArray, first: _IntArray, counts: _IntArray, samples: Samples
) -> tuple[_IntArray, _IntArray, _IntArray]:
    """Write the tokens that rows take of at least one draw each. All [rows]; first, counts: their draws.

    Returns the last draw that each looks at, how many tokens it takes, and whether and why it ends.
    """
    max_tokens, draw = state.token_ids.shape[1], np.arange(counts.max())
    is_there = draw < counts[:, None]  # [rows, draws], as all below
    index = np.where(is_there, first[:, None] + draw, 0)
    drawn, failed = samples.token_ids.numpy()[index], samples.outcomes.numpy()[index] != SampleOutcome.DRAWN
    places = rows.num_known.numpy()[planned][:, None] + draw
    inside = np.minimum(places, max_tokens - 1)
    tokens, of_row = state.token_ids.numpy(), planned[:, None]
    is_draft = (draw < counts[:, None] - 1) & (places < max_tokens)
    is_right = is_draft & (drawn == tokens[of_row, inside])
    is_end = (drawn[:, :, None] == rows.end_tokens.numpy()[planned][:, None, :]).any(axis=2)
    reasons = np.where(places + 1 >= max_tokens, RowFinish.CONTEXT_FULL, RowFinish.GOES_ON)
    reasons = np.where(places + 1 >= rows.max_known.numpy()[of_row], RowFinish.LENGTH, reasons)
    reasons = np.where(is_end, RowFinish.END_TOKEN, reasons)
    reasons = np.where(places >= max_tokens, RowFinish.CONTEXT_FULL, reasons)
    reasons = np.where(failed, RowFinish.ERROR, reasons)
    last = ((reasons != RowFinish.GOES_ON) | ~is_right).argmax(axis=1)
    finish = np.take_along_axis(reasons, last[:, None], axis=1)[:, 0]
    fits = rows.num_known.numpy()[planned] + last < max_tokens
    is_kept = fits & (finish != RowFinish.ERROR)
    # Drafts before the last draw equal what was drawn, and lie where that would be written.
    where = (rows.num_known.numpy()[planned] + last)[is_kept]
    tokens[planned[is_kept], where] = drawn[np.arange(len(planned)), last][is_kept]
    return last, last + is_kept, finish

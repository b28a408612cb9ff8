"""draws for CPUs: a compiled call over all planned rows, in the calling thread. Knows rows, tokens and limits."""

import numpy as np
import numpy.typing as npt
import torch

from paceline_kernels.compiler import jit
from paceline_kernels.draws.columns import Advanced, DrawInputs, FinishCode, RowDraws
from paceline_kernels.sampling.columns import SampleOutcome, Samples, SamplingParameters
from paceline_kernels.step_inputs import PlanColumns, RowBuffers, StepInputs

_Int32Array = npt.NDArray[np.int32]
_Int64Array = npt.NDArray[np.int64]
_Float32Array = npt.NDArray[np.float32]
_UInt8Array = npt.NDArray[np.uint8]

# Plain integers for compiled code.
_DRAWN = int(SampleOutcome.DRAWN)
_GOES_ON, _END_TOKEN, _LENGTH, _CONTEXT_FULL, _ERROR = (
    int(finish)
    for finish in (
        FinishCode.GOES_ON,
        FinishCode.END_TOKEN,
        FinishCode.LENGTH,
        FinishCode.CONTEXT_FULL,
        FinishCode.ERROR,
    )
)


def draw_inputs(
    state: RowBuffers, rows: RowDraws, plan: PlanColumns, batch: StepInputs, num_draws: int, max_drafts: int
) -> DrawInputs:
    places, drawn_rows, top_k, offsets, num_logprobs = np.empty((5, num_draws), dtype=np.int32)
    temperature, top_p, min_p = np.empty((3, num_draws), dtype=np.float32)
    seeds = np.empty(num_draws, dtype=np.int64)
    cu_draws = np.empty(plan.rows.shape[0] + 1, dtype=np.int32)
    fill_draws(
        state.finish.numpy(),
        rows.num_prompt.numpy(),
        rows.num_known.numpy(),
        rows.temperature.numpy(),
        rows.top_k.numpy(),
        rows.top_p.numpy(),
        rows.min_p.numpy(),
        rows.seeds.numpy(),
        rows.num_logprobs.numpy(),
        plan.rows.numpy(),
        batch.cu_seqlens.numpy(),
        batch.context_lens.numpy(),
        max_drafts,
        places,
        cu_draws,
        drawn_rows,
        temperature,
        top_k,
        top_p,
        min_p,
        seeds,
        offsets,
        num_logprobs,
    )
    return DrawInputs(
        places=torch.from_numpy(places),
        cu_draws=torch.from_numpy(cu_draws),
        rows=torch.from_numpy(drawn_rows),
        parameters=SamplingParameters(
            temperature=torch.from_numpy(temperature),
            top_k=torch.from_numpy(top_k),
            top_p=torch.from_numpy(top_p),
            min_p=torch.from_numpy(min_p),
            seeds=torch.from_numpy(seeds),
            offsets=torch.from_numpy(offsets),
            num_logprobs=torch.from_numpy(num_logprobs),
        ),
    )


@jit.compiled_for_python
def fill_draws(
    finish: _Int32Array,
    num_prompt: _Int32Array,
    num_known: _Int32Array,
    row_temperature: _Float32Array,
    row_top_k: _Int32Array,
    row_top_p: _Float32Array,
    row_min_p: _Float32Array,
    row_seeds: _Int64Array,
    row_num_logprobs: _Int32Array,
    plan_rows: _Int32Array,
    cu_seqlens: _Int32Array,
    context_lens: _Int32Array,
    max_drafts: int,
    places: _Int32Array,
    cu_draws: _Int32Array,
    rows: _Int32Array,
    temperature: _Float32Array,
    top_k: _Int32Array,
    top_p: _Float32Array,
    min_p: _Float32Array,
    seeds: _Int64Array,
    offsets: _Int32Array,
    num_logprobs: _Int32Array,
) -> None:
    """Those up to `context_lens` are read, those from `places` on are written."""
    num_draws, at = len(places), 0
    cu_draws[0] = 0
    for planned in range(len(plan_rows)):
        row = plan_rows[planned]
        if 0 <= row < len(finish) and finish[row] == _GOES_ON:
            known, stop = num_known[row], context_lens[planned] + 1
            end = cu_seqlens[planned + 1] - stop
            for position in range(known, min(stop, known + 1 + max_drafts, known + num_draws - at)):
                places[at], rows[at], offsets[at] = end + position, row, position - num_prompt[row]
                temperature[at], top_k[at], top_p[at] = row_temperature[row], row_top_k[row], row_top_p[row]
                min_p[at], seeds[at], num_logprobs[at] = row_min_p[row], row_seeds[row], row_num_logprobs[row]
                at += 1
        cu_draws[planned + 1] = at
    places[at:], rows[at:], offsets[at:] = -1, -1, 0
    temperature[at:], top_k[at:], top_p[at:] = 0, 0, 1
    min_p[at:], seeds[at:], num_logprobs[at:] = 0, 0, -1


def advance_rows(
    state: RowBuffers, rows: RowDraws, plan: PlanColumns, batch: StepInputs, draws: DrawInputs, samples: Samples
) -> Advanced:
    num_planned = plan.rows.shape[0]
    num_accepted, finish = np.empty(num_planned, dtype=np.int32), np.empty(num_planned, dtype=np.uint8)
    advance(
        state.token_ids.numpy(),
        state.num_held.numpy(),
        state.num_computed.numpy(),
        state.finish.numpy(),
        rows.num_known.numpy(),
        rows.max_known.numpy(),
        rows.end_tokens.numpy(),
        plan.rows.numpy(),
        batch.context_lens.numpy(),
        draws.cu_draws.numpy(),
        samples.token_ids.numpy(),
        samples.outcomes.numpy(),
        num_accepted,
        finish,
    )
    return Advanced(torch.from_numpy(num_accepted), torch.from_numpy(finish))


@jit.compiled_for_python
def advance(
    token_ids: _Int32Array,
    num_held: _Int32Array,
    num_computed: _Int32Array,
    row_finish: _Int32Array,
    num_known: _Int32Array,
    max_known: _Int32Array,
    end_tokens: _Int32Array,
    plan_rows: _Int32Array,
    context_lens: _Int32Array,
    cu_draws: _Int32Array,
    drawn: _Int32Array,
    outcomes: _Int32Array,
    num_accepted: _Int32Array,
    finish: _UInt8Array,
) -> None:
    """The last two are written, and what changes of the first five."""
    max_tokens = token_ids.shape[1]
    for planned in range(len(plan_rows)):
        row = plan_rows[planned]
        num_accepted[planned], finish[planned] = 0, _GOES_ON
        if not 0 <= row < len(num_held):
            continue
        if row_finish[row] != _GOES_ON:
            finish[planned] = row_finish[row]
            continue
        known, accepted, reason = num_known[row], 0, _GOES_ON
        num_right = known - 1  # tokens whose keys and values are right once they are computed
        first, stop = cu_draws[planned], cu_draws[planned + 1]
        for draw in range(first, stop):
            place = num_right = known + draw - first
            if outcomes[draw] != _DRAWN:
                reason = _ERROR
                break
            if place == max_tokens:
                reason = _CONTEXT_FULL
                break
            token, draft = drawn[draw], token_ids[row, place]
            token_ids[row, place] = token
            accepted = draw - first + 1
            reason = _finish(token, place + 1, max_known[row], max_tokens, end_tokens[row])
            if reason != _GOES_ON or draw + 1 == stop or token != draft:
                break
        num_computed[row] = min(context_lens[planned], num_right)
        num_held[row] = num_known[row] = known + accepted
        row_finish[row] = reason
        num_accepted[planned], finish[planned] = accepted, reason


@jit.compiled
def _finish(token: int, num_known: int, max_known: int, max_tokens: int, end_tokens: _Int32Array) -> int:
    """What a row's latest token means for it."""
    for end_token in end_tokens:
        if token == end_token:
            return _END_TOKEN
    if num_known >= max_known:
        return _LENGTH
    return _CONTEXT_FULL if num_known >= max_tokens else _GOES_ON

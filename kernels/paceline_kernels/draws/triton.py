"""draws for GPUs: one launch before a step's tokens are drawn, one behind it.

Both are a program per planned row that does a few hundred bytes of work: what they take is what a launch takes, 2 to
3 us. Knows rows, tokens and limits; not who planned, nor who drafted.
"""

import torch
import triton
import triton.language as tl

from paceline_kernels.draws import Advanced, DrawInputs, RowDraws
from paceline_kernels.sampling.columns import Samples, SamplingParameters
from paceline_kernels.step_inputs import PlanColumns, RowBuffers, StepInputs

# Numbers that a program of draw_inputs writes at a time, one per thread: more than the draws of a row.
_BLOCK = 128
_NUM_WARPS = 4
# Draws and end tokens of a row meet in a table, which one warp holds up to this size, 32 numbers per thread, and four
# warps up to the largest, 64 * 128.
_TABLE_OF_A_WARP = 1024


def draw_inputs(
    state: RowBuffers, rows: RowDraws, plan: PlanColumns, batch: StepInputs, num_draws: int, max_drafts: int
) -> DrawInputs:
    device, num_planned = state.token_ids.device, plan.rows.shape[0]

    def column(dtype: torch.dtype, size: int = num_draws) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    places, cu_draws, drawn_rows = column(torch.int32), column(torch.int32, num_planned + 1), column(torch.int32)
    drawn = SamplingParameters(
        temperature=column(torch.float32),
        top_k=column(torch.int32),
        top_p=column(torch.float32),
        min_p=column(torch.float32),
        seeds=column(torch.int64),
        offsets=column(torch.int32),
        num_logprobs=column(torch.int32),
    )
    draw_inputs_kernel[(num_planned + 1,)](
        state.finish,
        rows.num_prompt,
        rows.num_known,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        rows.seeds,
        rows.num_logprobs,
        plan.rows,
        batch.cu_seqlens,
        batch.context_lens,
        places,
        cu_draws,
        drawn_rows,
        drawn.temperature,
        drawn.top_k,
        drawn.top_p,
        drawn.min_p,
        drawn.seeds,
        drawn.offsets,
        drawn.num_logprobs,
        num_planned,
        num_draws,
        state.num_held.shape[0],
        max_drafts + 1,
        PLANNED=max(16, triton.next_power_of_2(num_planned)),
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
    )
    return DrawInputs(places, cu_draws, drawn_rows, drawn)


def advance_rows(
    state: RowBuffers,
    rows: RowDraws,
    plan: PlanColumns,
    batch: StepInputs,
    draws: DrawInputs,
    samples: Samples,
    max_drafts: int,
) -> Advanced:
    device, num_planned = state.token_ids.device, plan.rows.shape[0]
    out = Advanced(
        num_accepted=torch.empty(num_planned, dtype=torch.int32, device=device),
        finish=torch.empty(num_planned, dtype=torch.uint8, device=device),
    )
    num_end_tokens = rows.end_tokens.shape[1]
    table = (triton.next_power_of_2(max_drafts + 1), triton.next_power_of_2(max(1, num_end_tokens)))
    advance_rows_kernel[(num_planned,)](
        state.token_ids,
        state.num_held,
        state.num_computed,
        state.finish,
        rows.num_known,
        rows.max_known,
        rows.end_tokens,
        plan.rows,
        batch.context_lens,
        draws.cu_draws,
        samples.token_ids,
        samples.outcomes,
        out.num_accepted,
        out.finish,
        state.num_held.shape[0],
        MAX_TOKENS=state.token_ids.shape[1],
        NUM_END_TOKENS=num_end_tokens,
        DRAWS=table[0],
        END_TOKENS=table[1],
        num_warps=1 if table[0] * table[1] <= _TABLE_OF_A_WARP else _NUM_WARPS,
    )
    return out


@triton.jit(
    do_not_specialize=["num_planned", "num_draws", "num_rows", "max_draws"],
    do_not_specialize_on_alignment=["plan_rows"],
)
def draw_inputs_kernel(
    finish,
    num_prompt,
    num_known,
    row_temperature,
    row_top_k,
    row_top_p,
    row_min_p,
    row_seeds,
    row_num_logprobs,
    plan_rows,
    cu_seqlens,
    context_lens,
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
    num_planned,
    num_draws,
    num_rows,
    max_draws,
    PLANNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program per planned row, each of which counts the draws of all, and one more for the padding."""
    planned = tl.program_id(0)
    all_planned = tl.arange(0, PLANNED)
    all_rows = tl.load(plan_rows + all_planned, mask=all_planned < num_planned, other=-1)
    exists = (all_rows >= 0) & (all_rows < num_rows)
    goes_on = tl.load(finish + all_rows, mask=exists, other=1) == 0
    all_known = tl.load(num_known + all_rows, mask=exists, other=0)
    all_ends = tl.load(context_lens + all_planned, mask=exists, other=0)
    counts = tl.minimum(tl.maximum(all_ends + 1 - all_known, 0), max_draws)
    counts = tl.where(exists & goes_on, counts, 0)
    first = tl.minimum(tl.sum(tl.where(all_planned < planned, counts, 0)), num_draws)
    tl.store(cu_draws + planned, first)
    steps = tl.arange(0, BLOCK)
    if planned < num_planned:
        is_ours = all_planned == planned
        count = tl.minimum(tl.sum(tl.where(is_ours, counts, 0)), num_draws - first)
        if count > 0:  # so the row exists
            row = tl.sum(tl.where(is_ours, all_rows, 0)).to(tl.int64)
            position = tl.sum(tl.where(is_ours, all_known, 0)) + steps
            context_len = tl.sum(tl.where(is_ours, all_ends, 0))
            place = tl.load(cu_seqlens + planned + 1) - (context_len + 1 - position)
            inside = steps < count
            draw = first + steps
            tl.store(places + draw, place, mask=inside)
            tl.store(drawn_rows + draw, row.to(tl.int32), mask=inside)
            tl.store(offsets + draw, position - tl.load(num_prompt + row), mask=inside)
            tl.store(temperature + draw, tl.load(row_temperature + row), mask=inside)
            tl.store(top_k + draw, tl.load(row_top_k + row), mask=inside)
            tl.store(top_p + draw, tl.load(row_top_p + row), mask=inside)
            tl.store(min_p + draw, tl.load(row_min_p + row), mask=inside)
            tl.store(seeds + draw, tl.load(row_seeds + row), mask=inside)
            tl.store(num_logprobs + draw, tl.load(row_num_logprobs + row), mask=inside)
    else:
        for begin in range(first, num_draws, BLOCK):
            draw = begin + steps
            inside = draw < num_draws
            tl.store(places + draw, -1, mask=inside)
            tl.store(drawn_rows + draw, -1, mask=inside)
            tl.store(offsets + draw, 0, mask=inside)
            tl.store(temperature + draw, 0.0, mask=inside)
            tl.store(top_k + draw, 0, mask=inside)
            tl.store(top_p + draw, 1.0, mask=inside)
            tl.store(min_p + draw, 0.0, mask=inside)
            tl.store(seeds + draw, 0, mask=inside)
            tl.store(num_logprobs + draw, -1, mask=inside)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["plan_rows"])
def advance_rows_kernel(
    row_token_ids,
    num_held,
    num_computed,
    row_finish,
    num_known,
    max_known,
    row_end_tokens,
    plan_rows,
    context_lens,
    cu_draws,
    token_ids,
    outcomes,
    num_accepted,
    finish,
    num_rows,
    MAX_TOKENS: tl.constexpr,
    NUM_END_TOKENS: tl.constexpr,
    DRAWS: tl.constexpr,
    END_TOKENS: tl.constexpr,
):
    """A program per planned row. DRAWS, END_TOKENS: of one row at most, padded."""
    planned = tl.program_id(0)
    row = tl.load(plan_rows + planned).to(tl.int64)
    exists = (row >= 0) & (row < num_rows)
    ended = tl.load(row_finish + row, mask=exists, other=0)
    accepted = 0
    if exists & (ended == 0):
        first = tl.load(cu_draws + planned)
        count = tl.minimum(tl.load(cu_draws + planned + 1) - first, DRAWS)
        known = tl.load(num_known + row)
        draws = tl.arange(0, DRAWS)
        drawn = tl.load(token_ids + first + draws, mask=draws < count, other=0)
        failed = tl.load(outcomes + first + draws, mask=draws < count, other=0) != 0
        fits = known + draws < MAX_TOKENS
        # A draft per draw but the last.
        places = row_token_ids + row * MAX_TOKENS + known + draws
        drafts = tl.load(places, mask=(draws < count - 1) & fits, other=-1)
        ends = tl.arange(0, END_TOKENS)
        end_tokens = tl.load(row_end_tokens + row * NUM_END_TOKENS + ends, mask=ends < NUM_END_TOKENS, other=-1)
        is_end = tl.max((drawn[:, None] == end_tokens[None, :]).to(tl.int32), axis=1) != 0
        # Why the row would end with each draw; the later reason is the one that counts.
        reasons = tl.where(known + draws + 1 >= MAX_TOKENS, 3, 0)
        reasons = tl.where(known + draws + 1 >= tl.load(max_known + row), 2, reasons)
        reasons = tl.where(is_end, 1, reasons)
        reasons = tl.where(fits, reasons, 3)
        reasons = tl.where(failed, 4, reasons)
        is_last = (reasons != 0) | (draws >= count - 1) | (drawn != drafts)
        last = tl.min(tl.where(is_last, draws, DRAWS))
        if count > 0:
            ended = tl.sum(tl.where(draws == last, reasons, 0))
            is_kept = (draws == last) & (ended != 4) & fits
            accepted = last + tl.sum(is_kept.to(tl.int32))
            tl.store(places, drawn, mask=is_kept)
        else:
            last = -1
        tl.store(num_computed + row, tl.minimum(tl.load(context_lens + planned), known + last))
        tl.store(num_held + row, known + accepted)
        tl.store(num_known + row, known + accepted)
        tl.store(row_finish + row, ended)
    tl.store(num_accepted + planned, accepted)
    tl.store(finish + planned, ended.to(tl.uint8))

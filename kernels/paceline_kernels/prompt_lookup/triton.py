"""prompt_lookup for GPUs: a program per planned row that compares every place of the row with its end.

A row of 8,192 tokens is 32 kB, read MAX_MATCH times out of the nearest cache: some microseconds, and only where drafts
are wanted. Knows tokens; not rows' owners.
"""

import torch
import triton
import triton.language as tl

from paceline_kernels.draws import RowDraws
from paceline_kernels.prompt_lookup import MAX_MATCH, MIN_MATCH
from paceline_kernels.step_inputs import PlanColumns, RowBuffers

# Places that a program's eight warps compare at a time, four per thread.
_BLOCK = 1024
_NUM_WARPS = 8


def lookup_drafts(
    state: RowBuffers, rows: RowDraws, plan: PlanColumns, max_drafts: int, min_chance: torch.Tensor
) -> None:
    lookup_drafts_kernel[(plan.rows.shape[0],)](
        state.token_ids,
        state.num_held,
        state.num_computed,
        state.finish,
        rows.num_known,
        plan.rows,
        plan.num_tokens,
        min_chance,
        state.num_held.shape[0],
        max_drafts,
        MAX_TOKENS=state.token_ids.shape[1],
        DRAFTS=triton.next_power_of_2(max_drafts),
        MIN=MIN_MATCH,
        MAX=MAX_MATCH,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
    )


@triton.jit(
    do_not_specialize=["num_rows", "max_drafts"],
    do_not_specialize_on_alignment=["plan_rows", "plan_num_tokens", "min_chance"],
)
def lookup_drafts_kernel(
    row_token_ids,
    num_held,
    num_computed,
    finish,
    num_known,
    plan_rows,
    plan_num_tokens,
    min_chance,
    num_rows,
    max_drafts,
    MAX_TOKENS: tl.constexpr,
    DRAFTS: tl.constexpr,
    MIN: tl.constexpr,
    MAX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """DRAFTS: padded max_drafts."""
    row = tl.load(plan_rows + tl.program_id(0)).to(tl.int64)
    exists = (row >= 0) & (row < num_rows)
    goes_on = tl.load(finish + row, mask=exists, other=1) == 0
    known = tl.load(num_known + row, mask=exists, other=0)
    computed = tl.load(num_computed + row, mask=exists, other=0)
    wanted = tl.load(plan_num_tokens + tl.program_id(0)) - (known - computed)
    wanted = tl.minimum(tl.minimum(wanted, max_drafts), MAX_TOKENS - known)
    if goes_on & (wanted > 0):
        tokens = row_token_ids + row * MAX_TOKENS
        last = known - 1
        best = last * 0  # length of the match, then its place: the greatest is the longest, then the latest
        for begin in range(0, last, BLOCK):
            places = begin + tl.arange(0, BLOCK)
            lengths = tl.zeros([BLOCK], tl.int32)
            goes_back = places < last
            for back in tl.static_range(MAX):
                end = tl.load(tokens + last - back, mask=last >= back, other=-1)
                goes_back = goes_back & (places >= back)
                before = tl.load(tokens + places - back, mask=goes_back, other=-2)
                goes_back = goes_back & (before == end)
                lengths += goes_back.to(tl.int32)
            best = tl.maximum(best, tl.max(tl.where(lengths > 0, lengths * MAX_TOKENS + places, 0)))
        match = best % MAX_TOKENS
        length = best // MAX_TOKENS
        if length >= MIN:
            least = tl.load(min_chance)
            chance = least * 0 + 1
            worth = length * 0
            for draft in range(wanted):
                chance *= 1 - 1.0 / tl.minimum(length + draft, MAX)
                worth += (chance >= least).to(tl.int32)
            wanted = worth
            drafts = tl.arange(0, DRAFTS)
            inside = drafts < wanted
            token_ids = tl.load(tokens + match + 1 + drafts % (last - match), mask=inside, other=0)
            tl.store(tokens + known + drafts, token_ids, mask=inside)
            tl.store(num_held + row, known + wanted)

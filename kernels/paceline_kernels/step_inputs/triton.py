"""step_inputs for GPUs, in one launch: every program counts the tokens of all planned rows by itself.

The counts of 1,024 rows are 20 kB in the second level of the cache, read by each program at once: cheaper than a launch
of its own for their sum. Knows rows, tokens and blocks; not who planned.
"""

import torch
import triton
import triton.language as tl

from paceline_kernels.gpu import architecture
from paceline_kernels.gpu.architecture import Architecture
from paceline_kernels.step_inputs import PlanColumns, RowBuffers, StepInputs

# Tokens, or cells of a block table, that a program of four warps does at a time: two per thread.
BLOCK = {Architecture.SM_80: 256, Architecture.SM_90: 256}
# Programs per row: a chunk of 8,192 tokens takes each of them 8 turns, a decode one of them one turn.
_PROGRAMS_PER_ROW = 4
_NUM_WARPS = 4


def step_inputs(state: RowBuffers, plan: PlanColumns, num_tokens: int, block_size: int) -> StepInputs:
    device, num_planned = state.token_ids.device, plan.rows.shape[0]
    num_rows, max_tokens = state.token_ids.shape
    max_blocks = state.block_table.shape[1]
    out = StepInputs(
        token_ids=torch.empty(num_tokens, dtype=torch.int32, device=device),
        positions=torch.empty(num_tokens, dtype=torch.int32, device=device),
        slot_mapping=torch.empty(num_tokens, dtype=torch.int64, device=device),
        cu_seqlens=torch.empty(num_planned + 1, dtype=torch.int32, device=device),
        context_lens=torch.empty(num_planned, dtype=torch.int32, device=device),
        block_tables=torch.empty((num_planned, max_blocks), dtype=torch.int32, device=device),
    )
    step_inputs_kernel[(num_planned + 1, _PROGRAMS_PER_ROW)](
        state.token_ids,
        state.num_held,
        state.num_computed,
        state.finish,
        state.block_table,
        plan.rows,
        plan.num_tokens,
        out.token_ids,
        out.positions,
        out.slot_mapping,
        out.cu_seqlens,
        out.context_lens,
        out.block_tables,
        num_planned,
        num_tokens,
        num_rows,
        MAX_TOKENS=max_tokens,
        MAX_BLOCKS=max_blocks,
        BLOCK_SIZE=block_size,
        PLANNED=max(16, triton.next_power_of_2(num_planned)),
        BLOCK=BLOCK[architecture.current()],
        num_warps=_NUM_WARPS,
    )
    return out


# Columns of a plan lie anywhere in what the host has sent: another alignment must not be another compilation.
@triton.jit(
    do_not_specialize=["num_planned", "num_tokens", "num_rows"],
    do_not_specialize_on_alignment=["plan_rows", "plan_num_tokens"],
)
def step_inputs_kernel(
    row_token_ids,
    num_held,
    num_computed,
    finish,
    row_block_table,
    plan_rows,
    plan_num_tokens,
    token_ids,
    positions,
    slot_mapping,
    cu_seqlens,
    context_lens,
    block_tables,
    num_planned,
    num_tokens,
    num_rows,
    MAX_TOKENS: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PLANNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Programs [place, part]: a place per planned row, and one more for the padding. PLANNED: padded num_planned."""
    place = tl.program_id(0)
    part = tl.program_id(1) * BLOCK
    stride = tl.num_programs(1) * BLOCK
    places = tl.arange(0, PLANNED)
    rows = tl.load(plan_rows + places, mask=places < num_planned, other=-1)
    planned = tl.load(plan_num_tokens + places, mask=places < num_planned, other=0)
    exists = (rows >= 0) & (rows < num_rows)
    goes_on = tl.load(finish + rows, mask=exists, other=1) == 0
    starts = tl.load(num_computed + rows, mask=exists, other=0)
    held = tl.load(num_held + rows, mask=exists, other=0)
    counts = tl.where(goes_on, tl.maximum(tl.minimum(planned, held - starts), 0), 0)
    first = tl.minimum(tl.sum(tl.where(places < place, counts, 0)), num_tokens)
    offsets = tl.arange(0, BLOCK)
    if part == 0:
        tl.store(cu_seqlens + place, first)
    if place < num_planned:
        is_ours = places == place
        count = tl.minimum(tl.sum(tl.where(is_ours, counts, 0)), num_tokens - first)
        start = tl.sum(tl.where(is_ours, starts, 0))
        row = tl.sum(tl.where(is_ours, rows, 0)).to(tl.int64)
        if part == 0:
            tl.store(context_lens + place, start + count)
        for begin in range(part, count, stride):
            step = begin + offsets
            position = start + step
            inside = (step < count) & (position < MAX_TOKENS)
            has_cell = inside & (position // BLOCK_SIZE < MAX_BLOCKS)
            token_id = tl.load(row_token_ids + row * MAX_TOKENS + position, mask=inside, other=0)
            cell = row_block_table + row * MAX_BLOCKS + position // BLOCK_SIZE
            block = tl.load(cell, mask=has_cell, other=-1).to(tl.int64)
            slot = tl.where(block >= 0, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
            tl.store(token_ids + first + step, token_id, mask=inside)
            tl.store(positions + first + step, position, mask=inside)
            tl.store(slot_mapping + first + step, slot, mask=inside)
        num_cells = tl.minimum((start + count + BLOCK_SIZE - 1) // BLOCK_SIZE, MAX_BLOCKS)
        for begin in range(part, num_cells, stride):
            cells = begin + offsets
            blocks = tl.load(row_block_table + row * MAX_BLOCKS + cells, mask=cells < num_cells, other=-1)
            tl.store(block_tables + place.to(tl.int64) * MAX_BLOCKS + cells, blocks, mask=cells < num_cells)
    else:
        for begin in range(first + part, num_tokens, stride):
            padding = begin + offsets
            tl.store(token_ids + padding, 0, mask=padding < num_tokens)
            tl.store(positions + padding, 0, mask=padding < num_tokens)
            tl.store(slot_mapping + padding, -1, mask=padding < num_tokens)

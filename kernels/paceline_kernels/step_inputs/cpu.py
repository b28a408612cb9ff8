"""step_inputs for CPUs: one compiled call over all planned rows, in the calling thread. (torch would wake threads.)"""

import numpy as np
import numpy.typing as npt
import torch

from paceline_kernels.compiler import jit
from paceline_kernels.step_inputs import PlanColumns, RowBuffers, StepInputs

_Int32Array = npt.NDArray[np.int32]
_Int64Array = npt.NDArray[np.int64]


def step_inputs(state: RowBuffers, plan: PlanColumns, num_tokens: int, block_size: int) -> StepInputs:
    num_planned = plan.rows.shape[0]
    token_ids, positions = np.empty(num_tokens, dtype=np.int32), np.empty(num_tokens, dtype=np.int32)
    slots = np.empty(num_tokens, dtype=np.int64)
    cu_seqlens, context_lens = np.empty(num_planned + 1, dtype=np.int32), np.empty(num_planned, dtype=np.int32)
    block_tables = np.empty((num_planned, state.block_table.shape[1]), dtype=np.int32)
    fill_inputs(
        state.token_ids.numpy(),
        state.num_held.numpy(),
        state.num_computed.numpy(),
        state.finish.numpy(),
        state.block_table.numpy(),
        plan.rows.numpy(),
        plan.num_tokens.numpy(),
        block_size,
        token_ids,
        positions,
        slots,
        cu_seqlens,
        context_lens,
        block_tables,
    )
    return StepInputs(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions),
        slot_mapping=torch.from_numpy(slots),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        context_lens=torch.from_numpy(context_lens),
        block_tables=torch.from_numpy(block_tables),
    )


@jit.compiled_for_python
def fill_inputs(
    row_token_ids: _Int32Array,
    num_held: _Int32Array,
    num_computed: _Int32Array,
    finish: _Int32Array,
    row_block_table: _Int32Array,
    plan_rows: _Int32Array,
    plan_num_tokens: _Int32Array,
    block_size: int,
    token_ids: _Int32Array,
    positions: _Int32Array,
    slots: _Int64Array,
    cu_seqlens: _Int32Array,
    context_lens: _Int32Array,
    block_tables: _Int32Array,
) -> None:
    """The first seven are read, the last six are written."""
    num_tokens, at = len(token_ids), 0
    cu_seqlens[0] = 0
    for planned in range(len(plan_rows)):
        row, start, stop = plan_rows[planned], 0, 0
        if 0 <= row < len(num_held):
            start = stop = num_computed[row]
            if finish[row] == 0:
                stop = max(start, min(start + plan_num_tokens[planned], start + num_tokens - at, num_held[row]))
            num_blocks = min((stop + block_size - 1) // block_size, block_tables.shape[1])
            block_tables[planned, :num_blocks] = row_block_table[row, :num_blocks]
        for position in range(start, stop):
            block = np.int64(row_block_table[row, position // block_size])
            token_ids[at], positions[at] = row_token_ids[row, position], position
            slots[at] = block * block_size + position % block_size if block >= 0 else -1
            at += 1
        cu_seqlens[planned + 1], context_lens[planned] = at, stop
    token_ids[at:], positions[at:], slots[at:] = 0, 0, -1

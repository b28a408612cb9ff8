"""step_inputs for CPUs: numpy over all planned rows at once, in the calling thread. (torch would wake threads.)"""

import numpy as np
import torch

from paceline_kernels.step_inputs import PlanColumns, RowState, StepInputs


def step_inputs(state: RowState, plan: PlanColumns, num_tokens: int, block_size: int) -> StepInputs:
    num_planned, max_blocks = plan.rows.shape[0], state.block_table.shape[1]
    planned, table = plan.rows.numpy(), state.block_table.numpy()
    exists = (planned >= 0) & (planned < state.num_held.shape[0])
    rows = np.where(exists, planned, 0)
    starts = np.where(exists, state.num_computed.numpy()[rows], 0)
    left = np.maximum(np.minimum(plan.num_tokens.numpy(), state.num_held.numpy()[rows] - starts), 0)
    counts = np.where(exists & (state.finish.numpy()[rows] == 0), left, 0)
    cu_seqlens = np.zeros(num_planned + 1, dtype=np.int32)
    np.minimum(np.cumsum(counts), num_tokens, out=cu_seqlens[1:], casting="unsafe")
    counts = np.diff(cu_seqlens)
    context_lens = starts + counts
    total = int(cu_seqlens[-1])
    row_of_token = np.repeat(rows, counts)
    at = np.arange(total, dtype=np.int32) + np.repeat(starts - cu_seqlens[:-1], counts)
    blocks = table[row_of_token, at // block_size].astype(np.int64)
    token_ids, positions = np.zeros((2, num_tokens), dtype=np.int32)
    slots = np.full(num_tokens, -1, dtype=np.int64)
    token_ids[:total] = state.token_ids.numpy()[row_of_token, at]
    positions[:total] = at
    slots[:total] = np.where(blocks >= 0, blocks * block_size + at % block_size, -1)
    block_tables = torch.empty((num_planned, max_blocks), dtype=torch.int32)
    width = min(-(-int(context_lens.max()) // block_size), max_blocks)
    block_tables.numpy()[:, :width] = table[rows, :width]
    return StepInputs(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions),
        slot_mapping=torch.from_numpy(slots),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        context_lens=torch.from_numpy(context_lens),
        block_tables=block_tables,
    )

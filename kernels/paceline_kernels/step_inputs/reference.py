"""step_inputs in plain Python, one token at a time."""

import torch

from paceline_kernels.step_inputs import PlanColumns, RowBuffers, StepInputs


def step_inputs(state: RowBuffers, plan: PlanColumns, num_tokens: int, block_size: int) -> StepInputs:
    """See `paceline_kernels.step_inputs.step_inputs`; cells of block tables that are not written are 0."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    cu_seqlens, context_lens = [0], []
    tables = torch.zeros((plan.rows.shape[0], state.block_table.shape[1]), dtype=torch.int32)
    for place, (row, planned) in enumerate(zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True)):
        start = stop = 0
        if 0 <= row < state.num_held.shape[0]:
            start = stop = int(state.num_computed[row])
            if not state.finish[row]:
                room = num_tokens - len(positions)
                stop = max(start, min(start + planned, start + room, int(state.num_held[row])))
            num_blocks = -(-stop // block_size)
            tables[place, :num_blocks] = state.block_table[row, :num_blocks]
        for position in range(start, stop):
            block = int(state.block_table[row, position // block_size])
            token_ids.append(int(state.token_ids[row, position]))
            positions.append(position)
            slots.append(block * block_size + position % block_size if block >= 0 else -1)
        cu_seqlens.append(len(positions))
        context_lens.append(stop)
    num_padding = num_tokens - len(positions)
    return StepInputs(
        token_ids=torch.tensor(token_ids + [0] * num_padding, dtype=torch.int32),
        positions=torch.tensor(positions + [0] * num_padding, dtype=torch.int32),
        slot_mapping=torch.tensor(slots + [-1] * num_padding, dtype=torch.int64),
        cu_seqlens=torch.tensor(cu_seqlens, dtype=torch.int32),
        context_lens=torch.tensor(context_lens, dtype=torch.int32),
        block_tables=tables,
    )

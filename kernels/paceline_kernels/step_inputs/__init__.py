"""step_inputs: the flat batch of a step, made on the device from what a plan names and what the device keeps of rows.

So a plan can be queued before the step before it has ended: the host need not know the tokens drawn, how many drafts
were accepted, nor which rows have ended meanwhile. Knows rows, tokens and blocks; not who planned.
"""

from dataclasses import dataclass

import torch

from paceline_kernels import gpu
from paceline_kernels.arguments import check_tensor
from paceline_kernels.devices import is_cpu
from paceline_kernels.errors import KernelArgumentError, UnsupportedDeviceError

MAX_PLANNED_ROWS = 4096


@dataclass(frozen=True, slots=True)
class RowBuffers:
    """What the device keeps of every row. All contiguous."""

    token_ids: torch.Tensor  # [num_rows, max_model_len] int32
    num_held: torch.Tensor  # [num_rows] int32: how many of them are known or drafted, so that they can be computed
    num_computed: torch.Tensor  # [num_rows] int32
    finish: torch.Tensor  # [num_rows] int32, 0 for rows that go on
    block_table: torch.Tensor  # [num_rows, max_blocks_per_row] int32, -1 where there is no block


@dataclass(frozen=True, slots=True)
class PlanColumns:
    """What a plan says of every row it names. Both contiguous."""

    rows: torch.Tensor  # [num_planned] int32, no two alike; a number that is no row is none, as in padding
    num_tokens: torch.Tensor  # [num_planned] int32, how many tokens it computes at most


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the layers of a model are given."""

    token_ids: torch.Tensor  # [num_tokens] int32, 0 in padding
    positions: torch.Tensor  # [num_tokens] int32, 0 in padding
    slot_mapping: torch.Tensor  # [num_tokens] int64, -1 in padding, and where the table has no block
    cu_seqlens: torch.Tensor  # [num_planned + 1] int32, of tokens that are no padding
    context_lens: torch.Tensor  # [num_planned] int32, this step's tokens included
    block_tables: torch.Tensor  # [num_planned, max_blocks_per_row] int32; cells behind context_lens hold anything


def step_inputs(state: RowBuffers, plan: PlanColumns, num_tokens: int, block_size: int) -> StepInputs:
    """The next tokens of the planned rows, row by row: as many as planned, or as the row holds; none if it has ended.

    num_tokens: how many tokens the batch has with its padding; what a plan names beyond them is not computed.
    block_size: slots of a block. Runs on the state's device without waiting for it.
    Raises KernelArgumentError, UnsupportedDeviceError.
    """
    op = "step_inputs"
    num_rows, num_planned = state.num_held.shape[0], plan.rows.shape[0]
    check_tensor(op, "token_ids", state.token_ids, torch.int32, (num_rows, None))
    check_tensor(op, "num_held", state.num_held, torch.int32, (num_rows,))
    check_tensor(op, "num_computed", state.num_computed, torch.int32, (num_rows,))
    check_tensor(op, "finish", state.finish, torch.int32, (num_rows,))
    check_tensor(op, "block_table", state.block_table, torch.int32, (num_rows, None))
    check_tensor(op, "rows", plan.rows, torch.int32, (num_planned,))
    check_tensor(op, "num_tokens", plan.num_tokens, torch.int32, (num_planned,))
    if not 1 <= num_planned <= MAX_PLANNED_ROWS:
        raise KernelArgumentError(op, f"a plan names 1 to {MAX_PLANNED_ROWS} rows, not {num_planned}")
    if is_cpu(state.token_ids.device):
        from paceline_kernels.step_inputs import cpu

        return cpu.step_inputs(state, plan, num_tokens, block_size)
    if gpu.has_kernels(state.token_ids.device):
        from paceline_kernels.step_inputs import triton

        return triton.step_inputs(state, plan, num_tokens, block_size)
    raise UnsupportedDeviceError(op, state.token_ids.device, gpu.DEVICES)

"""prompt_lookup: drafts from a row's own tokens: what followed the last few where they stood before.

On the device, because only it knows a row's last tokens while steps are in flight. "Prompt lookup decoding", Saxena,
2023, https://github.com/apoorvumang/prompt-lookup-decoding. Knows tokens; not who planned, nor what becomes of drafts.
"""

import torch

from paceline_kernels import gpu
from paceline_kernels.arguments import check_tensor
from paceline_kernels.devices import is_cpu
from paceline_kernels.draws import RowDraws, check_rows
from paceline_kernels.errors import UnsupportedDeviceError
from paceline_kernels.step_inputs import PlanColumns, RowBuffers

__all__ = ["MAX_MATCH", "MIN_MATCH", "lookup_drafts"]

MIN_MATCH = 2  # tokens that have to be alike
MAX_MATCH = 16  # more alike are no better


def lookup_drafts(
    state: RowBuffers, rows: RowDraws, plan: PlanColumns, max_drafts: int, min_chance: torch.Tensor
) -> None:
    """Write drafts behind the known tokens of planned rows and count them in state.num_held, in place.

    A row wants as many as its plan has tokens beyond the known ones, up to max_drafts; a row that has ended, none. They
    follow the longest match of its last tokens, the latest of equally long ones, and repeat what lies between. A row
    without a match of MIN_MATCH tokens, or of one token, gets none. max_drafts: 1 to draws.MAX_DRAFTS. min_chance: [1]
    float32, of all drafts up to one being right; less likely ones are left out. A draft behind a match of n tokens is
    right with 1 - 1 / n, and then the match has n + 1.
    Runs on the state's device without waiting for it. Raises KernelArgumentError, UnsupportedDeviceError.
    """
    op = "lookup_drafts"
    check_rows(op, state, rows, plan, max_drafts)
    check_tensor(op, "min_chance", min_chance, torch.float32, (1,))
    if is_cpu(state.token_ids.device):
        from paceline_kernels.prompt_lookup import cpu

        cpu.lookup_drafts(state, rows, plan, max_drafts, min_chance)
    elif gpu.has_kernels(state.token_ids.device):
        from paceline_kernels.prompt_lookup import triton

        triton.lookup_drafts(state, rows, plan, max_drafts, min_chance)
    else:
        raise UnsupportedDeviceError(op, state.token_ids.device, gpu.DEVICES)

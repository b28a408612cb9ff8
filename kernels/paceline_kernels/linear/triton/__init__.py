"""linear for GPUs: few rows by a kernel of ours, many by the library, where it is at the limit. Knows sizes."""

import torch
from torch.nn import functional

from paceline_kernels.gpu.splits import Splits
from paceline_kernels.linear.triton.few_rows import launch_few_rows
from paceline_kernels.linear.triton.launches import LIBRARY_FROM_ROWS, LIBRARY_FROM_WEIGHTS
from paceline_kernels.linear.triton.tiles import launch_tiles


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, splits: Splits) -> torch.Tensor:
    if splits is Splits.FIXED:
        return launch_tiles(x, weight, None, bias)
    if x.shape[0] >= LIBRARY_FROM_ROWS or weight.numel() >= LIBRARY_FROM_WEIGHTS:
        return functional.linear(x, weight, bias)
    return launch_few_rows(x, weight, None, bias)

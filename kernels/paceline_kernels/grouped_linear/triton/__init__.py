"""grouped_linear for GPUs: which product for how many rows. Knows sizes."""

import torch
from torch.nn import functional

from paceline_kernels.gpu import architecture
from paceline_kernels.gpu.splits import Splits
from paceline_kernels.grouped_linear.triton.few_rows import launch_few_rows
from paceline_kernels.grouped_linear.triton.launches import MAX_TILE_ROWS, few_rows_launch
from paceline_kernels.grouped_linear.triton.tiles import launch_tiles
from paceline_kernels.grouped_linear.triton.widening import widened
from paceline_kernels.grouped_linear.weights import GroupedWeight


def grouped_linear(x: torch.Tensor, weight: GroupedWeight, bias: torch.Tensor | None, splits: Splits) -> torch.Tensor:
    if weight.order is not None:
        given, x = x, torch.empty(x.shape, dtype=x.dtype, device=x.device)
        torch.index_select(given, 1, weight.order, out=x)
    if splits is Splits.EVEN:
        num_tokens, num_outputs = x.shape[0], weight.layout.num_outputs
        launch = few_rows_launch(architecture.current(), num_tokens, num_outputs, is_plain=weight.is_plain)
        if launch is not None:
            return launch_few_rows(x, weight, bias, launch)
        if num_tokens > MAX_TILE_ROWS[weight.has_offsets]:
            return functional.linear(x, widened(weight, x.dtype), bias)
    return launch_tiles(x, weight, bias)

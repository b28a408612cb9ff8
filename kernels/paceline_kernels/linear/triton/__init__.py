"""linear for GPUs: few rows by a kernel of ours, many by the library, where it is at the limit. Knows sizes."""

import torch
from torch.nn import functional

from paceline_kernels.gpu import architecture
from paceline_kernels.gpu.splits import Splits
from paceline_kernels.linear.triton.few_rows import launch_few_rows
from paceline_kernels.linear.triton.launches import Product, product_of_16_bits
from paceline_kernels.linear.triton.tiles import launch_tiles


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, splits: Splits, slices: int = 1
) -> torch.Tensor:
    product = Product.TILES
    if splits is Splits.EVEN:
        product = product_of_16_bits(architecture.current(), x.shape[0], weight.numel())
    match product:
        case Product.FEW_ROWS:
            return launch_few_rows(x, weight, None, bias)
        case Product.TILES:
            return launch_tiles(x, weight, None, bias, slices if splits is Splits.FIXED else 1)
        case Product.LIBRARY:
            return functional.linear(x, weight, bias)


def unrounded_linear(x: torch.Tensor, weight: torch.Tensor, slices: int, splits: Splits) -> torch.Tensor:
    is_few = product_of_16_bits(architecture.current(), x.shape[0], weight.numel()) is Product.FEW_ROWS
    if splits is Splits.EVEN and is_few:
        return launch_few_rows(x, weight, None, None, torch.float32)
    return launch_tiles(x, weight, None, None, slices if splits is Splits.FIXED else 1, torch.float32)

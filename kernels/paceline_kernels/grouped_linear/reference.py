"""grouped_linear in plain torch, in float64. Not batch-invariant, and not fast."""

import torch

from paceline_kernels.grouped_linear.weights import GroupedWeight, unpack_grouped


def grouped_linear(x: torch.Tensor, weight: GroupedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """See `paceline_kernels.grouped_linear.grouped_linear`, with no weight rounded; rounded to float32, at the end."""
    product = x.double() @ unpack_grouped(weight, torch.float64).T
    return (product if bias is None else product + bias).float()

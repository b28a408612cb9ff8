"""scaled_linear in plain torch, in float64. Not batch-invariant, and not fast."""

import torch

from paceline_kernels.scaled_linear.weights import ScaledWeight


def scaled_linear(x: torch.Tensor, weight: ScaledWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """See `paceline_kernels.scaled_linear.scaled_linear`, with no row of x rounded; rounded to float32, at the end."""
    product = (x.double() @ weight.values.double().T) * weight.scales.double()
    return (product if bias is None else product + bias).float()

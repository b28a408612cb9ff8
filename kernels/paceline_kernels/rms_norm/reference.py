"""rms_norm in plain torch, in float64."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """See `paceline_kernels.rms_norm.rms_norm`; rounded to float32 once, at the end."""
    if residual is not None:
        x = residual.add_(x)
    wide = x.double()
    return (weight.double() * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).float()

"""rms_norm in plain torch, in float64."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Rounded to float32 once, at the end."""
    if residual is not None:
        x = residual.add_(x)
    wide = x.double()
    return (weight.double() * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).float()


def rms_norm_heads(
    qkv: torch.Tensor, query_weight: torch.Tensor, key_weight: torch.Tensor, num_kv_heads: int, eps: float
) -> torch.Tensor:
    """What `paceline_kernels.rms_norm.rms_norm_heads` leaves in qkv."""
    queries, keys, values = torch.split(qkv, [qkv.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
    return torch.cat((rms_norm(queries, query_weight, eps), rms_norm(keys, key_weight, eps), values), dim=1)

"""rms_norm: root-mean-square normalisation, of rows with the residual addition before it, and of heads. Knows rows.

Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, https://arxiv.org/abs/1910.07467.
"""

import torch

from paceline_kernels.arguments import check_tensor
from paceline_kernels.errors import KernelArgumentError, UnsupportedDeviceError
from paceline_kernels.rms_norm import cpu


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """weight * x / sqrt(mean(x**2) + eps), row by row; with a residual, of their sum, which replaces the residual.

    x, residual: [num_tokens, hidden] float32. weight: [hidden] float32. All contiguous. residual += x in place where
    given. Returns [num_tokens, hidden] float32, new. Batch-invariant: rows do not influence each other.
    Raises KernelArgumentError, UnsupportedDeviceError.
    """
    check_tensor("rms_norm", "weight", weight, torch.float32, (None,))
    check_tensor("rms_norm", "x", x, torch.float32, (None, weight.shape[0]))
    if residual is not None:
        check_tensor("rms_norm", "residual", residual, torch.float32, (x.shape[0], weight.shape[0]))
    if x.device.type == "cpu":
        return cpu.rms_norm(x, weight, eps, residual)
    raise UnsupportedDeviceError("rms_norm", x.device)


def rms_norm_heads(
    qkv: torch.Tensor, query_weight: torch.Tensor, key_weight: torch.Tensor, num_kv_heads: int, eps: float
) -> None:
    """Normalise every query head and every key head in place, each by itself; values stay as they are.

    qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_dim], queries, keys, values. query_weight, key_weight:
    [head_dim]. All float32 and contiguous. Batch-invariant: heads do not influence each other.
    Raises KernelArgumentError, UnsupportedDeviceError.
    """
    op, head_dim = "rms_norm_heads", qkv.shape[-1]
    check_tensor(op, "qkv", qkv, torch.float32, (None, None, None))
    check_tensor(op, "query_weight", query_weight, torch.float32, (head_dim,))
    check_tensor(op, "key_weight", key_weight, torch.float32, (head_dim,))
    if qkv.shape[1] <= 2 * num_kv_heads:
        raise KernelArgumentError(op, f"qkv of shape {list(qkv.shape)} does not fit {num_kv_heads} KV heads")
    if qkv.device.type != "cpu":
        raise UnsupportedDeviceError(op, qkv.device)
    cpu.rms_norm_heads(qkv, query_weight, key_weight, num_kv_heads, eps)

"""rms_norm: root-mean-square normalisation, of rows with the residual addition before it, and of heads. Knows rows.

Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, https://arxiv.org/abs/1910.07467.
"""

import torch

from paceline_kernels import gpu
from paceline_kernels.arguments import check_tensor, float_type
from paceline_kernels.devices import is_cpu
from paceline_kernels.errors import KernelArgumentError, UnsupportedDeviceError
from paceline_kernels.gpu.rounded_rows import RoundedRows, unwritten_rows


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """weight * x / sqrt(mean(x**2) + eps), row by row; with a residual, of their sum, which replaces the residual.

    x, residual: [num_tokens, hidden]. weight: [hidden]. All contiguous, and of one type: float32 on a CPU, bfloat16 or
    float16 on a GPU, which computes in float32 and takes hidden up to 16384. residual += x in place where given, and
    what is normalised is the sum as it is kept. Returns [num_tokens, hidden] of that type, new. Batch-invariant: rows
    do not influence each other. Raises KernelArgumentError, UnsupportedDeviceError.
    """
    _check("rms_norm", x, weight, residual)
    if is_cpu(x.device):
        from paceline_kernels.rms_norm import cpu

        return cpu.rms_norm(x, weight, eps, residual)
    if gpu.has_kernels(x.device):
        from paceline_kernels.rms_norm import triton

        return triton.rms_norm(x, weight, eps, residual)
    raise UnsupportedDeviceError("rms_norm", x.device, gpu.DEVICES)


def rms_norm_rounded(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    rounded_to: torch.dtype,
    *,
    residual: torch.Tensor | None = None,
) -> RoundedRows:
    """For GPUs: what `rms_norm` returns, rounded as `scaled_linear` would round it, to the bit, without a launch.

    rounded_to: float8_e4m3fn or int8. Raises KernelArgumentError, UnsupportedDeviceError.
    """
    op = "rms_norm_rounded"
    _check(op, x, weight, residual)
    if not gpu.has_kernels(x.device):
        raise UnsupportedDeviceError(op, x.device, gpu.GPU_ONLY)
    from paceline_kernels.rms_norm import triton

    rows = unwritten_rows(x, x.shape[1], rounded_to)
    triton.rms_norm(x, weight, eps, residual, rows)
    return rows


def _check(op: str, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> None:
    dtype = float_type(op, "x", x)
    check_tensor(op, "weight", weight, dtype, (None,))
    check_tensor(op, "x", x, dtype, (None, weight.shape[0]))
    if residual is not None:
        check_tensor(op, "residual", residual, dtype, (x.shape[0], weight.shape[0]))


def rms_norm_heads(
    qkv: torch.Tensor, query_weight: torch.Tensor, key_weight: torch.Tensor, num_kv_heads: int, eps: float
) -> None:
    """Normalise every query head and every key head in place, each by itself; values stay as they are.

    qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_dim], queries, keys, values. query_weight, key_weight:
    [head_dim]. All contiguous, and of one type: float32 on a CPU, bfloat16 or float16 on a GPU. Batch-invariant: heads
    do not influence each other.
    Raises KernelArgumentError, UnsupportedDeviceError.
    """
    op, head_dim = "rms_norm_heads", qkv.shape[-1]
    dtype = float_type(op, "qkv", qkv)
    check_tensor(op, "qkv", qkv, dtype, (None, None, None))
    check_tensor(op, "query_weight", query_weight, dtype, (head_dim,))
    check_tensor(op, "key_weight", key_weight, dtype, (head_dim,))
    if qkv.shape[1] <= 2 * num_kv_heads:
        raise KernelArgumentError(op, f"qkv of shape {list(qkv.shape)} does not fit {num_kv_heads} KV heads")
    if is_cpu(qkv.device):
        from paceline_kernels.rms_norm import cpu

        cpu.rms_norm_heads(qkv, query_weight, key_weight, num_kv_heads, eps)
    elif gpu.has_kernels(qkv.device):
        from paceline_kernels.rms_norm import triton

        triton.rms_norm_heads(qkv, query_weight, key_weight, num_kv_heads, eps)
    else:
        raise UnsupportedDeviceError(op, qkv.device, gpu.DEVICES)

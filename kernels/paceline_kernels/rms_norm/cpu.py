"""rms_norm for CPUs: one pass for the sum of squares, in the order of `simd`, one to scale.

A decode step has few rows: they are done by the calling thread, because waking the others costs more.
"""

import numba
import numpy as np
import numpy.typing as npt
import torch

from paceline_kernels.compiler import jit
from paceline_kernels.vector import simd

_Float32Array = npt.NDArray[np.float32]
_Rows = _Float32Array

# From this many rows on, the rows are shared out among the threads.
_MIN_PARALLEL_ROWS = 32


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=torch.float32)
    if residual is None:
        normalize(x.numpy(), weight.numpy(), np.float32(eps), out.numpy())
    else:
        add_and_normalize(x.numpy(), residual.numpy(), weight.numpy(), np.float32(eps), out.numpy())
    return out


def rms_norm_heads(
    qkv: torch.Tensor, query_weight: torch.Tensor, key_weight: torch.Tensor, num_kv_heads: int, eps: float
) -> None:
    normalize_heads(qkv.numpy(), query_weight.numpy(), key_weight.numpy(), num_kv_heads, np.float32(eps))


@jit.compiled
def normalize_row(x: _Rows, weight: _Rows, eps: jit.Float32, out: _Rows) -> None:
    """out = one row of x normalised. All [hidden]; out may be x."""
    start = simd.address(x)
    mean = simd.dot(start, start, x.shape[0]) / np.float32(x.shape[0])
    scale = np.float32(1.0) / np.sqrt(mean + eps)
    for i in range(x.shape[0]):
        out[i] = weight[i] * (x[i] * scale)


@jit.compiled
def _add_and_normalize_row(x: _Rows, residual: _Rows, weight: _Rows, eps: jit.Float32, out: _Rows) -> None:
    for i in range(x.shape[0]):
        residual[i] += x[i]
    normalize_row(residual, weight, eps, out)


@jit.compiled_parallel
def normalize(x: _Rows, weight: _Rows, eps: jit.Float32, out: _Rows) -> None:
    """out = the rows of x normalised. All [num_tokens, hidden], weight [hidden]."""
    if x.shape[0] < _MIN_PARALLEL_ROWS:
        for row in range(x.shape[0]):
            normalize_row(x[row], weight, eps, out[row])
    else:
        for row in numba.prange(x.shape[0]):
            normalize_row(x[row], weight, eps, out[row])


@jit.compiled_parallel
def add_and_normalize(x: _Rows, residual: _Rows, weight: _Rows, eps: jit.Float32, out: _Rows) -> None:
    """residual += x; out = the rows of residual normalised. All [num_tokens, hidden], weight [hidden]."""
    if x.shape[0] < _MIN_PARALLEL_ROWS:
        for row in range(x.shape[0]):
            _add_and_normalize_row(x[row], residual[row], weight, eps, out[row])
    else:
        for row in numba.prange(x.shape[0]):
            _add_and_normalize_row(x[row], residual[row], weight, eps, out[row])


@jit.compiled
def _normalize_token(
    heads: _Rows, query_weight: _Float32Array, key_weight: _Float32Array, num_kv_heads: int, eps: jit.Float32
) -> None:
    num_heads = heads.shape[0] - 2 * num_kv_heads
    for head in range(num_heads):
        normalize_row(heads[head], query_weight, eps, heads[head])
    for head in range(num_heads, num_heads + num_kv_heads):
        normalize_row(heads[head], key_weight, eps, heads[head])


@jit.compiled_parallel
def normalize_heads(
    qkv: _Float32Array, query_weight: _Float32Array, key_weight: _Float32Array, num_kv_heads: int, eps: jit.Float32
) -> None:
    """The operation on arrays."""
    if qkv.shape[0] < _MIN_PARALLEL_ROWS:
        for token in range(qkv.shape[0]):
            _normalize_token(qkv[token], query_weight, key_weight, num_kv_heads, eps)
    else:
        for token in numba.prange(qkv.shape[0]):
            _normalize_token(qkv[token], query_weight, key_weight, num_kv_heads, eps)

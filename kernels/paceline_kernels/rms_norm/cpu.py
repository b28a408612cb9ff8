"""rms_norm for CPUs: one pass for the sum of squares, in the order of `simd`, one to scale.

A decode step has few rows: they are done by the calling thread, because waking the others costs more.
"""

import numba
import numpy as np
import numpy.typing as npt
import torch

from paceline_kernels import jit, simd

_Rows = npt.NDArray[np.float32]

# From this many rows on, the rows are shared out among the threads.
_MIN_PARALLEL_ROWS = 32


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None) -> torch.Tensor:
    """See `paceline_kernels.rms_norm.rms_norm`."""
    out = torch.empty(x.shape, dtype=torch.float32)
    if residual is None:
        normalize(x.numpy(), weight.numpy(), np.float32(eps), out.numpy())
    else:
        add_and_normalize(x.numpy(), residual.numpy(), weight.numpy(), np.float32(eps), out.numpy())
    return out


@jit.compiled
def normalize_row(x: _Rows, weight: _Rows, eps: jit.Float32, out: _Rows) -> None:
    """out = one row of x normalised. All [hidden]."""
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

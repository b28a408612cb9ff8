"""activation for CPUs: element by element, as vector code."""

import numba
import numpy as np
import numpy.typing as npt
import torch

from paceline_kernels import jit
from paceline_kernels.elementary import exp

_Rows = npt.NDArray[np.float32]

# From this many rows on, the rows are shared out among the threads.
_MIN_PARALLEL_ROWS = 8


def silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """See `paceline_kernels.activation.silu_and_multiply`."""
    out = torch.empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=torch.float32)
    gate_rows(gate_up.numpy(), out.numpy())
    return out


@jit.compiled
def _gate_row(gate_up: _Rows, out: _Rows) -> None:
    width = out.shape[0]
    for i in range(width):
        gate = gate_up[i]
        out[i] = gate / (np.float32(1.0) + exp(-gate)) * gate_up[width + i]


@jit.compiled_parallel
def gate_rows(gate_up: _Rows, out: _Rows) -> None:
    """out [num_tokens, intermediate] = silu(gate) * up of gate_up [num_tokens, 2 * intermediate]."""
    if out.shape[0] < _MIN_PARALLEL_ROWS:
        for row in range(out.shape[0]):
            _gate_row(gate_up[row], out[row])
    else:
        for row in numba.prange(out.shape[0]):
            _gate_row(gate_up[row], out[row])

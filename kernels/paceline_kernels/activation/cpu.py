"""activation for CPUs: element by element, as vector code."""

import numba
import numpy as np
import numpy.typing as npt
import torch

from paceline_kernels.activation.gates import Gate
from paceline_kernels.compiler import jit
from paceline_kernels.vector.elementary import exp, tanh

_Rows = npt.NDArray[np.float32]

# As compiled code knows them.
SILU, GELU_TANH = int(Gate.SILU), int(Gate.GELU_TANH)
_ONE = np.float32(1.0)
# 2 * sqrt(2 / pi), and the same times 0.044715.
_GELU_LINEAR = np.float32(1.5957691216057308)
_GELU_CUBIC = np.float32(0.07135481282656515)
# From this many rows on, the rows are shared out among the threads.
_MIN_PARALLEL_ROWS = 8


def gate_and_multiply(gate_up: torch.Tensor, gate: int) -> torch.Tensor:
    out = torch.empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=torch.float32)
    gate_rows(gate_up.numpy(), gate, out.numpy())
    return out


def softcap(x: torch.Tensor, cap: float) -> None:
    cap_rows(x.numpy(), np.float32(cap))


@jit.compiled
def silu(x: jit.Float32) -> jit.Float32:
    """x / (1 + e to the -x)."""
    return x / (_ONE + exp(-x))


@jit.compiled
def gelu_tanh(x: jit.Float32) -> jit.Float32:
    """GELU with its tanh written as an exponential: (1 + tanh(u)) / 2 = 1 / (1 + e to the -2u)."""
    return x / (_ONE + exp(-x * (_GELU_LINEAR + _GELU_CUBIC * (x * x))))


@jit.compiled_for_python
def cap_rows(x: _Rows, cap: jit.Float32) -> None:
    """x = cap * tanh(x / cap), element by element."""
    for row in range(x.shape[0]):
        for i in range(x.shape[1]):
            x[row, i] = cap * tanh(x[row, i] / cap)


@jit.compiled
def _gate_row(gate_up: _Rows, gate: int, out: _Rows) -> None:
    width = out.shape[0]
    if gate == SILU:
        for i in range(width):
            out[i] = silu(gate_up[i]) * gate_up[width + i]
    else:
        for i in range(width):
            out[i] = gelu_tanh(gate_up[i]) * gate_up[width + i]


@jit.compiled_parallel
def gate_rows(gate_up: _Rows, gate: int, out: _Rows) -> None:
    """out [num_tokens, intermediate] = gate(gates) * up of gate_up [num_tokens, 2 * intermediate]."""
    if out.shape[0] < _MIN_PARALLEL_ROWS:
        for row in range(out.shape[0]):
            _gate_row(gate_up[row], gate, out[row])
    else:
        for row in numba.prange(out.shape[0]):
            _gate_row(gate_up[row], gate, out[row])

"""activation: the gate of a gated feed-forward layer, and the cap of logits. Knows rows; not what made them.

Shazeer, "GLU Variants Improve Transformer", 2020, https://arxiv.org/abs/2002.05202. Hendrycks and Gimpel, "Gaussian
Error Linear Units", 2016, https://arxiv.org/abs/1606.08415.
"""

import enum

import torch

from paceline_kernels.activation import cpu
from paceline_kernels.arguments import check_tensor
from paceline_kernels.errors import KernelArgumentError, UnsupportedDeviceError


class Gate(enum.IntEnum):
    """What gates go through."""

    SILU = cpu.SILU  # x / (1 + exp(-x))
    GELU_TANH = cpu.GELU_TANH  # x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))


def gate_and_multiply(gate_up: torch.Tensor, gate: Gate) -> torch.Tensor:
    """gate(gates) * up.

    gate_up: [num_tokens, 2 * intermediate] float32, contiguous, the gates first. Returns [num_tokens, intermediate]
    float32, new. Batch-invariant: elements do not influence each other.
    Raises KernelArgumentError, UnsupportedDeviceError.
    """
    check_tensor("gate_and_multiply", "gate_up", gate_up, torch.float32, (None, None))
    if gate_up.shape[1] % 2:
        raise KernelArgumentError("gate_and_multiply", f"gate_up must have an even width, not {gate_up.shape[1]}")
    if gate_up.device.type == "cpu":
        return cpu.gate_and_multiply(gate_up, int(gate))
    raise UnsupportedDeviceError("gate_and_multiply", gate_up.device)


def softcap(x: torch.Tensor, cap: float) -> None:
    """Replace every x by cap * tanh(x / cap). x: [rows, width] float32, contiguous. cap: above 0.

    Batch-invariant: elements do not influence each other. Raises KernelArgumentError, UnsupportedDeviceError.
    """
    check_tensor("softcap", "x", x, torch.float32, (None, None))
    if cap <= 0:
        raise KernelArgumentError("softcap", f"the cap must be above 0, not {cap}")
    if x.device.type != "cpu":
        raise UnsupportedDeviceError("softcap", x.device)
    cpu.softcap(x, cap)

"""activation: the gate of a gated feed-forward layer. Knows rows of [gate, up]; not what made them.

Shazeer, "GLU Variants Improve Transformer", 2020, https://arxiv.org/abs/2002.05202.
"""

import torch

from paceline_kernels.activation import cpu
from paceline_kernels.arguments import check_tensor
from paceline_kernels.errors import KernelArgumentError, UnsupportedDeviceError


def silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, where silu(x) = x / (1 + exp(-x)).

    gate_up: [num_tokens, 2 * intermediate] float32, contiguous, the gates first. Returns [num_tokens, intermediate]
    float32, new. Batch-invariant: elements do not influence each other.
    Raises KernelArgumentError, UnsupportedDeviceError.
    """
    check_tensor("silu_and_multiply", "gate_up", gate_up, torch.float32, (None, None))
    if gate_up.shape[1] % 2:
        raise KernelArgumentError("silu_and_multiply", f"gate_up must have an even width, not {gate_up.shape[1]}")
    if gate_up.device.type == "cpu":
        return cpu.silu_and_multiply(gate_up)
    raise UnsupportedDeviceError("silu_and_multiply", gate_up.device)

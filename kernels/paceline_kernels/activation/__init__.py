"""activation: the gate of a gated feed-forward layer, and the cap of logits. Knows rows; not what made them.

Shazeer, "GLU Variants Improve Transformer", 2020, https://arxiv.org/abs/2002.05202. Hendrycks and Gimpel, "Gaussian
Error Linear Units", 2016, https://arxiv.org/abs/1606.08415.
"""

import torch

from paceline_kernels import gpu
from paceline_kernels.activation.gates import Gate
from paceline_kernels.arguments import check_tensor, float_type
from paceline_kernels.devices import is_cpu
from paceline_kernels.errors import KernelArgumentError, UnsupportedDeviceError

__all__ = ["Gate", "gate_and_multiply", "softcap"]


def gate_and_multiply(gate_up: torch.Tensor, gate: Gate) -> torch.Tensor:
    """gate(gates) * up.

    gate_up: [num_tokens, 2 * intermediate], contiguous, the gates first; float32 on a CPU, bfloat16 or float16 on a
    GPU. Returns [num_tokens, intermediate] of that type, new. Batch-invariant: elements do not influence each other.
    Raises KernelArgumentError, UnsupportedDeviceError.
    """
    check_tensor(
        "gate_and_multiply", "gate_up", gate_up, float_type("gate_and_multiply", "gate_up", gate_up), (None,) * 2
    )
    if gate_up.shape[1] % 2:
        raise KernelArgumentError("gate_and_multiply", f"gate_up must have an even width, not {gate_up.shape[1]}")
    if is_cpu(gate_up.device):
        from paceline_kernels.activation import cpu

        return cpu.gate_and_multiply(gate_up, int(gate))
    if gpu.has_kernels(gate_up.device):
        from paceline_kernels.activation import triton

        return triton.gate_and_multiply(gate_up, int(gate))
    raise UnsupportedDeviceError("gate_and_multiply", gate_up.device, gpu.DEVICES)


def softcap(x: torch.Tensor, cap: float) -> None:
    """Replace every x by cap * tanh(x / cap). x: [rows, width], contiguous; float32 on a CPU, bfloat16 or float16 on
    a GPU, computed with in float32. cap: above 0.

    Batch-invariant: elements do not influence each other. Raises KernelArgumentError, UnsupportedDeviceError.
    """
    check_tensor("softcap", "x", x, float_type("softcap", "x", x), (None, None))
    if cap <= 0:
        raise KernelArgumentError("softcap", f"the cap must be above 0, not {cap}")
    if is_cpu(x.device):
        from paceline_kernels.activation import cpu

        cpu.softcap(x, cap)
    elif gpu.has_kernels(x.device):
        from paceline_kernels.activation import triton

        triton.softcap(x, cap)
    else:
        raise UnsupportedDeviceError("softcap", x.device, gpu.DEVICES)

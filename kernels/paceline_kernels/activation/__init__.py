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
from paceline_kernels.gpu.rounded_rows import RoundedRows

__all__ = ["Gate", "gate_and_multiply", "gate_and_multiply_rounded", "softcap"]


def gate_and_multiply(gate_up: torch.Tensor, gate: Gate) -> torch.Tensor:
    """gate(gates) * up.

    gate_up: [num_tokens, 2 * intermediate], contiguous, the gates first; float32 on a CPU, bfloat16 or float16 on a
    GPU. Returns [num_tokens, intermediate] of that type, new. Batch-invariant: elements do not influence each other.
    Raises KernelArgumentError, UnsupportedDeviceError.
    """
    _check("gate_and_multiply", gate_up)
    if is_cpu(gate_up.device):
        from paceline_kernels.activation import cpu

        return cpu.gate_and_multiply(gate_up, int(gate))
    if gpu.has_kernels(gate_up.device):
        from paceline_kernels.activation import triton

        return triton.gate_and_multiply(gate_up, int(gate))
    raise UnsupportedDeviceError("gate_and_multiply", gate_up.device, gpu.DEVICES)


def gate_and_multiply_rounded(gate_up: torch.Tensor, gate: Gate, rounded_to: torch.dtype) -> RoundedRows:
    """For GPUs: what `gate_and_multiply` returns, rounded as `scaled_linear` would round it, to the bit.

    rounded_to: float8_e4m3fn or int8. Raises KernelArgumentError, UnsupportedDeviceError.
    """
    op = "gate_and_multiply_rounded"
    _check(op, gate_up)
    if not gpu.has_kernels(gate_up.device):
        raise UnsupportedDeviceError(op, gate_up.device, gpu.GPU_ONLY)
    from paceline_kernels.activation import triton

    return triton.gate_and_multiply_rounded(gate_up, int(gate), rounded_to)


def _check(op: str, gate_up: torch.Tensor) -> None:
    check_tensor(op, "gate_up", gate_up, float_type(op, "gate_up", gate_up), (None, None))
    if gate_up.shape[1] % 2:
        raise KernelArgumentError(op, f"gate_up must have an even width, not {gate_up.shape[1]}")


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

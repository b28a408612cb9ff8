"""linear: a matrix product with weights kept [out, in]. Knows float numbers; it refuses to know quantised weights."""

import torch

from paceline_kernels import gpu
from paceline_kernels.arguments import check_tensor, float_type
from paceline_kernels.devices import is_cpu
from paceline_kernels.errors import UnsupportedDeviceError
from paceline_kernels.gpu.splits import Splits

__all__ = ["Splits", "linear"]


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, splits: Splits = Splits.EVEN
) -> torch.Tensor:
    """x times the transpose of weight, plus the bias.

    x: [num_tokens, in]. weight: [out, in]. bias: [out]. All of one type and contiguous: float32 on a CPU, bfloat16 or
    float16 on a GPU, where sums are float32, and rounded once but for what torch lets its
    library round before (`allow_bf16_reduced_precision_reduction`). Returns [num_tokens, out] of that type, new.
    Batch-invariant on a CPU: a row of the result depends on that row of x alone, bit for bit. On a GPU that holds with
    Splits.FIXED; with Splits.EVEN the product is whichever is fastest for as many rows.
    Raises KernelArgumentError, UnsupportedDeviceError.
    """
    if not is_cpu(x.device) and not gpu.has_kernels(x.device):
        raise UnsupportedDeviceError("linear", x.device, gpu.DEVICES)
    dtype = float_type("linear", "x", x)
    check_tensor("linear", "weight", weight, dtype, (None, None))
    check_tensor("linear", "x", x, dtype, (None, weight.shape[1]))
    if bias is not None:
        check_tensor("linear", "bias", bias, dtype, (weight.shape[0],))
    if is_cpu(x.device):
        from paceline_kernels.linear import cpu

        return cpu.linear(x, weight, bias)
    from paceline_kernels.linear import triton

    return triton.linear(x, weight, bias, splits)

"""scaled_linear: a matrix product with weights of 8 bits and a scale per output, for GPUs.

Knows weights whose scales are factors of whole sums; it refuses to know scales of groups or blocks of inputs, which
`quantized_linear` has for CPUs.
"""

import torch

from paceline_kernels import gpu
from paceline_kernels.arguments import check_tensor, float_type
from paceline_kernels.errors import KernelArgumentError, UnsupportedDeviceError
from paceline_kernels.gpu.splits import Splits
from paceline_kernels.scaled_linear.weights import ScaledWeight, quantize_rows

__all__ = ["ScaledWeight", "Splits", "quantize_rows", "scaled_linear"]


def scaled_linear(
    x: torch.Tensor, weight: ScaledWeight, bias: torch.Tensor | None = None, *, splits: Splits = Splits.EVEN
) -> torch.Tensor:
    """x times the transpose of weight, plus the bias.

    x: [num_tokens, in] bfloat16 or float16. weight: values [out, in] float8_e4m3fn or int8, scales [out] float32.
    bias: [out] of x's type. All contiguous. Returns [num_tokens, out] of x's type, new.

    Products are made of x and the stored numbers as they are, summed in float32, scaled and rounded once. But for one
    case: many rows of bfloat16 by float8_e4m3fn, with Splits.EVEN, where `in` and `out` are multiples of 16. There each
    row of x is rounded to float8_e4m3fn, too, under a scale of its own, which is off by at most a sixteenth of a
    number, and matrix instructions are twice as fast.

    With Splits.FIXED a row of the result depends on that row of x alone, bit for bit; with Splits.EVEN the product is
    whichever is fastest for as many rows.
    Raises KernelArgumentError (also for float8_e4m3fn on a GPU without such arithmetic), UnsupportedDeviceError.
    """
    op = "scaled_linear"
    if not gpu.has_kernels(x.device):
        raise UnsupportedDeviceError(op, x.device, gpu.GPU_ONLY)
    if weight.values.dtype not in (torch.float8_e4m3fn, torch.int8):
        raise KernelArgumentError(op, f"values must be torch.float8_e4m3fn or torch.int8, not {weight.values.dtype}")
    check_tensor(op, "values", weight.values, weight.values.dtype, (None, None))
    num_outputs, num_inputs = weight.values.shape
    dtype = float_type(op, "x", x)
    check_tensor(op, "x", x, dtype, (None, num_inputs))
    check_tensor(op, "scales", weight.scales, torch.float32, (num_outputs,))
    if bias is not None:
        check_tensor(op, "bias", bias, dtype, (num_outputs,))
    from paceline_kernels.scaled_linear import triton

    return triton.scaled_linear(x, weight, bias, splits)

"""scaled_linear: a matrix product with weights of 8 bits and a scale per output, for GPUs.

Knows weights whose scales are factors of whole sums; it refuses to know scales of groups or blocks of inputs, which
`quantized_linear` has for CPUs.
"""

import torch

from paceline_kernels import gpu
from paceline_kernels.arguments import check_tensor, float_type
from paceline_kernels.errors import KernelArgumentError, UnsupportedDeviceError
from paceline_kernels.gpu.rounded_rows import RoundedRows
from paceline_kernels.gpu.splits import Splits
from paceline_kernels.scaled_linear.weights import ScaledWeight, quantize_rows

__all__ = ["RoundedRows", "ScaledWeight", "Splits", "quantize_rows", "rounded_type", "scaled_linear"]


def scaled_linear(
    x: torch.Tensor | RoundedRows,
    weight: ScaledWeight,
    bias: torch.Tensor | None = None,
    *,
    splits: Splits = Splits.EVEN,
) -> torch.Tensor:
    """x times the transpose of weight, plus the bias.

    x: [num_tokens, in] bfloat16 or float16, or such rows rounded to what `rounded_type` says. weight: values [out, in]
    float8_e4m3fn or int8, scales [out] float32. bias: [out] of x's type. All contiguous. Returns [num_tokens, out] of
    x's type, new.

    Products are made of x and the stored numbers as they are, summed in float32, scaled and rounded once. Not so where
    `rounded_type` says one: each row of x is rounded to it, too, under a scale of its own, and matrix instructions are
    twice as fast. In float8_e4m3fn that is off by at most a sixteenth of a number, in int8 by a 254th of the row's
    largest, and int8 is summed exactly.

    With Splits.FIXED a row of the result depends on that row of x alone, bit for bit; with Splits.EVEN the product is
    whichever is fastest for as many rows.
    Raises KernelArgumentError (also for float8_e4m3fn on a GPU without such arithmetic), UnsupportedDeviceError.
    """
    op = "scaled_linear"
    rows = x.numbers if isinstance(x, RoundedRows) else x
    if not gpu.has_kernels(rows.device):
        raise UnsupportedDeviceError(op, rows.device, gpu.GPU_ONLY)
    if weight.values.dtype not in (torch.float8_e4m3fn, torch.int8):
        raise KernelArgumentError(op, f"values must be torch.float8_e4m3fn or torch.int8, not {weight.values.dtype}")
    check_tensor(op, "values", weight.values, weight.values.dtype, (None, None))
    num_outputs, num_inputs = weight.values.shape
    if isinstance(x, RoundedRows):
        rounded_to = rounded_type(rows.shape[0], x.dtype, weight, splits)
        if rounded_to is None:
            raise KernelArgumentError(
                op, f"a product of {rows.shape[0]} rows by this weight takes none that are rounded"
            )
        check_tensor(op, "numbers", rows, rounded_to, (None, num_inputs))
        check_tensor(op, "scales of rows", x.scales, torch.float32, (rows.shape[0], 1))
    else:
        check_tensor(op, "x", x, float_type(op, "x", x), (None, num_inputs))
    check_tensor(op, "scales", weight.scales, torch.float32, (num_outputs,))
    if bias is not None:
        check_tensor(op, "bias", bias, x.dtype, (num_outputs,))
    from paceline_kernels.scaled_linear import triton

    return triton.scaled_linear(x, weight, bias, splits)


def rounded_type(num_tokens: int, dtype: torch.dtype, weight: ScaledWeight, splits: Splits) -> torch.dtype | None:
    """What a product of so many rows of x's type rounds them to: the weight's type, or None where they stay.

    Many rows by int8, and many of bfloat16 by float8_e4m3fn where its sizes are multiples of 16, from compute
    capability 9.0 on, both with Splits.EVEN. For GPUs: whoever makes x may round it instead.
    """
    from paceline_kernels.scaled_linear import triton

    return triton.rounded_type(num_tokens, dtype, weight, splits)

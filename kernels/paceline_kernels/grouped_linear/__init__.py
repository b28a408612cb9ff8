"""grouped_linear: a matrix product with weights of 4 or 8 bits whose inputs share scales in groups.

Knows one form of weights, which all formats of files are brought into. It refuses to know the formats.
"""

import torch

from paceline_kernels import gpu
from paceline_kernels.arguments import check_tensor, float_type
from paceline_kernels.devices import is_cpu
from paceline_kernels.errors import UnsupportedDeviceError
from paceline_kernels.gpu.splits import Splits
from paceline_kernels.grouped_linear.weights import (
    Codes,
    GroupedLayout,
    GroupedWeight,
    new_grouped,
    pack_grouped,
    unpack_grouped,
)

__all__ = [
    "Codes",
    "GroupedLayout",
    "GroupedWeight",
    "Splits",
    "grouped_linear",
    "new_grouped",
    "pack_grouped",
    "unpack_grouped",
]
_OP = "grouped_linear"


def grouped_linear(
    x: torch.Tensor, weight: GroupedWeight, bias: torch.Tensor | None = None, *, splits: Splits = Splits.EVEN
) -> torch.Tensor:
    """x times the transpose of weight, plus the bias.

    x: [num_tokens, in] float32 on a CPU, bfloat16 or float16 on a GPU. bias: [out] of x's type. All contiguous.
    Returns [num_tokens, out] of x's type, new.

    On a GPU the sum over a tile's inputs in a group, of products of x and the codes' numbers less the middle, is
    float32, as is what follows: with zeros the sum of x times (middle - zero) is added; that times the scale is added
    to the sums before, groups in ascending order, and with minima the sum of x times the minimum. It is rounded once.
    With Splits.FIXED that is all, and a row of the result depends on that row of x alone, bit for bit. With Splits.EVEN
    sums of parts of the inputs are added up at the end, and from some hundred rows on the weights are first rounded to
    x's type. On a CPU weights become float32, and the result is batch-invariant.

    Raises KernelArgumentError, UnsupportedDeviceError.
    """
    if not is_cpu(x.device) and not gpu.has_kernels(x.device):
        raise UnsupportedDeviceError(_OP, x.device, gpu.DEVICES)
    layout, dtype = weight.layout, float_type(_OP, "x", x)
    check_tensor(_OP, "x", x, dtype, (None, layout.num_inputs))
    if weight.table is not None:
        check_tensor(_OP, "table", weight.table, dtype, (16,))
    if bias is not None:
        check_tensor(_OP, "bias", bias, dtype, (layout.num_outputs,))
    if is_cpu(x.device):
        from paceline_kernels.grouped_linear import cpu

        return cpu.grouped_linear(x, weight, bias)
    from paceline_kernels.grouped_linear import triton

    return triton.grouped_linear(x, weight, bias, splits)

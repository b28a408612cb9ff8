"""quantized_linear: a matrix product of rows made int8 with weights of 4 or 8 bits, scales for each group of 32 inputs.

Knows packed weights; not where they came from. Why groups: one scale for a whole row, or worse a whole batch, lets one
large value take the precision of all others; here it takes that of 31 neighbours.
"""

import torch

from paceline_kernels.arguments import check_tensor
from paceline_kernels.errors import UnsupportedDeviceError
from paceline_kernels.quantized_linear.packing import PackedWeight, WeightFormat, pack_int4, pack_int8, quantize

__all__ = ["PackedWeight", "WeightFormat", "pack_int4", "pack_int8", "quantize", "quantized_linear", "unpack_rows"]


def quantized_linear(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """Rows, quantised, times the transpose of the weight.

    x: [num_tokens, in] float32, contiguous. Each group of 32 becomes round(x * (127 / largest magnitude)), to even,
    under the scale largest / 127. Returns [num_tokens, out] float32, new.
    Batch-invariant: a row of the result depends on that row of x alone, bit for bit. A NaN or an infinity in a row
    makes all of that row NaN. Raises KernelArgumentError, UnsupportedDeviceError.
    """
    check_tensor("quantized_linear", "x", x, torch.float32, (None, weight.num_inputs))
    if x.device.type == "cpu":
        from paceline_kernels.quantized_linear import cpu

        return cpu.quantized_linear(x, weight)
    raise UnsupportedDeviceError("quantized_linear", x.device)


def unpack_rows(weight: PackedWeight, indices: torch.Tensor) -> torch.Tensor:
    """The rows of the matrix that `indices`, [num_rows] int32, name: [num_rows, in] float32, new.

    Raises KernelArgumentError, UnsupportedDeviceError.
    """
    check_tensor("unpack_rows", "indices", indices, torch.int32, (None,))
    if indices.device.type == "cpu":
        from paceline_kernels.quantized_linear import cpu

        return cpu.unpack_rows(weight, indices)
    raise UnsupportedDeviceError("unpack_rows", indices.device)

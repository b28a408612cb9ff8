"""take_rows: rows of a table by index, such as the embeddings of tokens. Knows indices; not what they stand for."""

import torch

from paceline_kernels import gpu
from paceline_kernels.arguments import check_tensor, float_type
from paceline_kernels.devices import is_cpu
from paceline_kernels.errors import UnsupportedDeviceError
from paceline_kernels.take_rows import cpu


def take_rows(table: torch.Tensor, indices: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Row `indices[i]` of the table for every i, times the scale.

    table: [num_rows, width], float32 on a CPU, bfloat16 or float16 on a GPU. indices: [count] int32. Both contiguous.
    Returns [count, width] of the table's type, new.
    -1, as in padding, gives a row of NaN. Any other index outside of the table is refused on a CPU, and gives NaN on a
    GPU, since finding it would mean waiting for the device. Raises KernelArgumentError, UnsupportedDeviceError.
    """
    check_tensor("take_rows", "table", table, float_type("take_rows", "table", table), (None, None))
    check_tensor("take_rows", "indices", indices, torch.int32, (None,))
    if is_cpu(table.device):
        return cpu.take_rows(table, indices, scale)
    if gpu.has_kernels(table.device):
        from paceline_kernels.take_rows import triton

        return triton.take_rows(table, indices, scale)
    raise UnsupportedDeviceError("take_rows", table.device, gpu.DEVICES)

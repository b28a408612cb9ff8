"""take_rows: rows of a table by index, such as the embeddings of tokens. Knows indices; not what they stand for."""

import torch

from paceline_kernels.arguments import check_tensor
from paceline_kernels.errors import UnsupportedDeviceError
from paceline_kernels.take_rows import cpu


def take_rows(table: torch.Tensor, indices: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Row `indices[i]` of the table for every i, times the scale.

    table: [num_rows, width] float32. indices: [count] int32. Both contiguous. Returns [count, width] float32, new.
    Raises KernelArgumentError (also for an index outside of the table), UnsupportedDeviceError.
    """
    check_tensor("take_rows", "table", table, torch.float32, (None, None))
    check_tensor("take_rows", "indices", indices, torch.int32, (None,))
    if table.device.type == "cpu":
        return cpu.take_rows(table, indices, scale)
    raise UnsupportedDeviceError("take_rows", table.device)

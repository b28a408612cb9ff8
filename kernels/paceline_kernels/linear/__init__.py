"""linear: a matrix product with weights kept [out, in]. Knows float32 only; it refuses to know quantised weights."""

import torch

from paceline_kernels.arguments import check_tensor
from paceline_kernels.errors import UnsupportedDeviceError
from paceline_kernels.linear import cpu


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x times the transpose of weight.

    x: [num_tokens, in] float32. weight: [out, in] float32. Both contiguous. Returns [num_tokens, out] float32, new.
    Batch-invariant: a row of the result depends on that row of x alone, bit for bit.
    Raises KernelArgumentError, UnsupportedDeviceError.
    """
    check_tensor("linear", "weight", weight, torch.float32, (None, None))
    check_tensor("linear", "x", x, torch.float32, (None, weight.shape[1]))
    if x.device.type == "cpu":
        return cpu.linear(x, weight)
    raise UnsupportedDeviceError("linear", x.device)

"""linear: a matrix product with weights kept [out, in]. Knows float32 only; it refuses to know quantised weights."""

import torch

from paceline_kernels.arguments import check_tensor
from paceline_kernels.errors import UnsupportedDeviceError
from paceline_kernels.linear import cpu


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x times the transpose of weight, plus the bias.

    x: [num_tokens, in]. weight: [out, in]. bias: [out]. All float32 and contiguous. Returns [num_tokens, out], new.
    Batch-invariant: a row of the result depends on that row of x alone, bit for bit.
    Raises KernelArgumentError, UnsupportedDeviceError.
    """
    check_tensor("linear", "weight", weight, torch.float32, (None, None))
    check_tensor("linear", "x", x, torch.float32, (None, weight.shape[1]))
    if bias is not None:
        check_tensor("linear", "bias", bias, torch.float32, (weight.shape[0],))
    if x.device.type == "cpu":
        return cpu.linear(x, weight, bias)
    raise UnsupportedDeviceError("linear", x.device)

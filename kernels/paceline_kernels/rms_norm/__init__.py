"""rms_norm: root-mean-square normalisation, with the residual addition before it. Knows rows; not where they come from.

Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, https://arxiv.org/abs/1910.07467.
"""

import torch

from paceline_kernels.arguments import check_tensor
from paceline_kernels.errors import UnsupportedDeviceError
from paceline_kernels.rms_norm import cpu


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """weight * x / sqrt(mean(x**2) + eps), row by row; with a residual, of their sum, which replaces the residual.

    x, residual: [num_tokens, hidden] float32. weight: [hidden] float32. All contiguous. residual += x in place where
    given. Returns [num_tokens, hidden] float32, new. Batch-invariant: rows do not influence each other.
    Raises KernelArgumentError, UnsupportedDeviceError.
    """
    check_tensor("rms_norm", "weight", weight, torch.float32, (None,))
    check_tensor("rms_norm", "x", x, torch.float32, (None, weight.shape[0]))
    if residual is not None:
        check_tensor("rms_norm", "residual", residual, torch.float32, (x.shape[0], weight.shape[0]))
    if x.device.type == "cpu":
        return cpu.rms_norm(x, weight, eps, residual)
    raise UnsupportedDeviceError("rms_norm", x.device)

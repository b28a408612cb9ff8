"""Weights of 8 bits with a scale per output, and how they are made of float ones. Knows no product.

One scale for all inputs of an output is a factor of its sum: products are made of the stored numbers themselves.
Apart from the operation, which imports its backends: these take such weights too.
"""

from dataclasses import dataclass

import torch

from paceline_kernels.errors import KernelArgumentError

# The largest number that is stored. -128 is not used, so that a weight and its negative are the same but for the sign.
_LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """The matrix values * scales[:, None]."""

    values: torch.Tensor  # [out, in] float8_e4m3fn or int8
    scales: torch.Tensor  # [out] float32


def quantize_rows(weight: torch.Tensor, dtype: torch.dtype) -> ScaledWeight:
    """Each row under the scale that makes its largest magnitude the largest number of `dtype`; rounded to nearest.

    weight: [out, in] of floats, finite, on any device. dtype: float8_e4m3fn or int8. A row of zeros has the scale 1.
    Raises KernelArgumentError.
    """
    if dtype not in _LARGEST or weight.ndim != 2 or not weight.is_floating_point():
        problem = f"{weight.dtype} of shape {list(weight.shape)} cannot become {dtype}: floats [out, in] become 8 bits"
        raise KernelArgumentError("quantize_rows", problem)
    wide = weight.float()
    scales = wide.abs().amax(dim=1) / _LARGEST[dtype]
    scales = torch.where(scales > 0, scales, 1.0)
    numbers = wide / scales[:, None]
    return ScaledWeight((numbers.round() if dtype == torch.int8 else numbers).to(dtype), scales)

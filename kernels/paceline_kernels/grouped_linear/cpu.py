"""grouped_linear for CPUs: the weights as float32, times x. The measure of GPUs, and slow: CPUs serve by
`quantized_linear`.
"""

import torch

from paceline_kernels.grouped_linear.weights import GroupedWeight, unpack_grouped
from paceline_kernels.linear import cpu


def grouped_linear(x: torch.Tensor, weight: GroupedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    return cpu.linear(x, unpack_grouped(weight, torch.float32), bias, slices=1)

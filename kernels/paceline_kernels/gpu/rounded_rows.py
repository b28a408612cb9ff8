"""Rows of activations rounded to 8 bits, each under a scale of its own. Knows no product, nor who rounds.

Apart from `triton`, where the arithmetic is, because operations name these where there is no Triton, too.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RoundedRows:
    """The rows numbers * scales, nearly those that were rounded."""

    numbers: torch.Tensor  # [num_tokens, width] float8_e4m3fn or int8
    scales: torch.Tensor  # [num_tokens, 1] float32
    dtype: torch.dtype  # of what was rounded, and of products


def unwritten_rows(x: torch.Tensor, width: int, rounded_to: torch.dtype) -> RoundedRows:
    """For a kernel to write: as many as x has, of whose type they were, and on its device."""
    numbers = torch.empty((x.shape[0], width), dtype=rounded_to, device=x.device)
    return RoundedRows(numbers, torch.empty((x.shape[0], 1), dtype=torch.float32, device=x.device), x.dtype)

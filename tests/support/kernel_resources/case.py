"""What a case is, and the tensors of its call. Knows no operation.

Apart from `cases`, which imports the modules that make some.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Case:
    """One call. Its name says what is special about it."""

    name: str
    call: Callable[[], object]


def type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")

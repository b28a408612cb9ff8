"""Tensors for tests, small ones and such as have little memory. Apart, because most tests need no paged batch."""

import dataclasses
import math
import mmap
from collections.abc import Callable, Sequence
from typing import Any

import torch

_NO_RESERVE = 0x4000  # of Linux: `mmap` names it from Python 3.13 on


def int32(*values: int) -> torch.Tensor:
    """[values]"""
    return torch.tensor(values, dtype=torch.int32)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Standard normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_logits(num_rows: int, vocab_size: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    """[num_rows, vocab_size] normal numbers with a few exact ties."""
    return (normal(num_rows, vocab_size, seed=seed) * spread * 4).round() / 4


def spread(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros, of which only those pages have memory that are written to. Offsets of 32 bits lead in front of them."""
    num_bytes = (math.prod(shape) + 2**31) * dtype.itemsize
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    return torch.frombuffer(memory, dtype=dtype)[2**31 :].view(shape)


def placed(place: Callable[[torch.Tensor], torch.Tensor], columns: Any) -> Any:  # noqa: ANN401  of its type
    """The same columns where `place` puts each, nested ones too; what is no column stays."""
    if isinstance(columns, torch.Tensor):
        return place(columns)
    if not dataclasses.is_dataclass(columns) or isinstance(columns, type):
        return columns
    return type(columns)(*(placed(place, getattr(columns, field.name)) for field in dataclasses.fields(columns)))

"""Every way in which attention's kernels are launched: each line of both launch tables, and what may be asked of them.

Compiling one of them takes seconds, so no line is compiled twice without need.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kernel_resources.case import Case, meta
from paceline_kernels.attention import triton as attention
from paceline_kernels.gpu.architecture import Architecture
from paceline_kernels.gpu.splits import Splits

_ROWS, _TOKENS, _KV_HEADS, _GROUP = 8, 64, 8, 4


@dataclass(frozen=True, slots=True)
class _Options:
    """What a caller may ask for."""

    dtype: torch.dtype = torch.bfloat16
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    splits: Splits = Splits.EVEN
    short_tokens: int = 1


def cases(architecture: Architecture) -> Iterator[Case]:
    """Both kernels and the fold, in each."""
    is_fp8 = architecture >= Architecture.SM_90
    for head_dim in (64, 128, 256):
        yield _case(head_dim, torch.bfloat16, _Options())
        yield _case(head_dim, torch.int8, _Options())
        if is_fp8:
            yield _case(head_dim, torch.float8_e4m3fn, _Options(block_size=64))
    everything = _Options(window=4096, softcap=50.0, splits=Splits.FIXED, short_tokens=5)
    yield _case(128, torch.bfloat16, everything)


def _case(head_dim: int, cache_type: torch.dtype, options: _Options) -> Case:
    name = f"attention {head_dim} {str(cache_type).removeprefix('torch.')}"
    special = " all options" if options.softcap else f" blocks of {options.block_size}"
    return Case(name + special, lambda: _call(head_dim, cache_type, options))


def _call(head_dim: int, cache_type: torch.dtype, options: _Options) -> None:
    cache = meta(1000, _KV_HEADS, options.block_size, head_dim, dtype=cache_type)
    scales = {
        torch.bfloat16: None,
        torch.int8: meta(*cache.shape[:3], dtype=torch.float32),
        torch.float8_e4m3fn: meta(_KV_HEADS, dtype=torch.float32),
    }[cache_type]
    attention.paged_attention(
        meta(_TOKENS, _KV_HEADS * _GROUP, head_dim, dtype=options.dtype),
        cache,
        cache,
        meta(_ROWS, 64, dtype=torch.int32),
        meta(_ROWS + 1, dtype=torch.int32),
        meta(_ROWS, dtype=torch.int32),
        head_dim**-0.5,
        options.window,
        options.softcap,
        scales,
        scales,
        options.splits,
        options.short_tokens,
        _TOKENS,
    )

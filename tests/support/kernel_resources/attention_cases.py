"""Every way in which attention's kernels are launched: each line of both launch tables, and what may be asked of them.

Compiling one of them takes seconds, so no line is compiled twice without need.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from kernel_resources.case import Case, meta, type_name
from paceline_kernels.attention import triton as attention
from paceline_kernels.gpu.splits import Splits

_ROWS, _TOKENS, _KV_HEADS, _GROUP = 8, 64, 8, 4


@dataclass(frozen=True, slots=True)
class _Options:
    """What a caller may ask for."""

    dtype: torch.dtype = torch.bfloat16  # of queries, and of caches of 16 bits
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    splits: Splits = Splits.EVEN
    short_tokens: int = 1
    max_query_len: int = _TOKENS
    num_rows: int = _ROWS

    @property
    def names(self) -> Iterator[str]:
        """What is not as usual."""
        if self.dtype != torch.bfloat16:
            yield "float16"
        if self.window:
            yield "window"
        if self.softcap:
            yield "softcap"
        if self.splits is Splits.FIXED:
            yield "fixed"
        if self.max_query_len == self.short_tokens > 1:
            yield f"drafts {self.short_tokens - 1}"
        if self.num_rows != _ROWS:
            yield f"rows {self.num_rows}"


def cases(*, has_fp8: bool) -> Iterator[Case]:
    """Both kernels and the fold in each line; what differs for few rows of float8, and where all rows are chunks."""
    lines = {64: _Options(torch.float16), 128: _Options(), 256: _Options(window=4096)}
    for head_dim, options in lines.items():
        yield _case(head_dim, options.dtype, options)
        yield _case(head_dim, torch.int8, options)
    if has_fp8:
        for head_dim, options in lines.items():
            yield _case(head_dim, torch.float8_e4m3fn, replace(options, block_size=64))
        yield _case(128, torch.float8_e4m3fn, _Options(block_size=64, max_query_len=1, num_rows=1))
    verifying = _Options(block_size=64, short_tokens=8, max_query_len=8)
    for head_dim, cache_type in ((128, torch.bfloat16), (256, torch.bfloat16), (128, torch.int8)):
        yield _case(head_dim, cache_type, verifying)
    if has_fp8:
        yield _case(128, torch.float8_e4m3fn, verifying)
    everything = _Options(window=4096, softcap=50.0, splits=Splits.FIXED, short_tokens=5)
    yield _case(128, torch.bfloat16, everything)


def _case(head_dim: int, cache_type: torch.dtype, options: _Options) -> Case:
    name = f"attention {head_dim} {type_name(cache_type)} blocks of {options.block_size}"
    return Case(" ".join([name, *options.names]), lambda: _call(head_dim, cache_type, options))


def _call(head_dim: int, cache_type: torch.dtype, options: _Options) -> None:
    cache = meta(1000, _KV_HEADS, options.block_size, head_dim, dtype=cache_type)
    scales = {
        options.dtype: None,
        torch.int8: meta(*cache.shape[:3], dtype=torch.float32),
        torch.float8_e4m3fn: meta(_KV_HEADS, dtype=torch.float32),
    }[cache_type]
    attention.paged_attention(
        meta(_TOKENS, _KV_HEADS * _GROUP, head_dim, dtype=options.dtype),
        cache,
        cache,
        meta(options.num_rows, 64, dtype=torch.int32),
        meta(options.num_rows + 1, dtype=torch.int32),
        meta(options.num_rows, dtype=torch.int32),
        head_dim**-0.5,
        options.window,
        options.softcap,
        scales,
        scales,
        options.splits,
        options.short_tokens,
        options.max_query_len,
    )

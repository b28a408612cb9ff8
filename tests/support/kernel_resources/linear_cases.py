"""Every way in which matrix products are launched: each line of both launch tables, and the sizes of few rows.

Compiling one of them takes seconds, so of what shares a line only that is compiled which needs most.
"""

from collections.abc import Iterator
from functools import partial

import torch

from kernel_resources.case import Case, meta, type_name
from paceline_kernels.gpu.architecture import Architecture
from paceline_kernels.linear import Splits, linear
from paceline_kernels.linear.triton.launches import TILES, TilesLaunch
from paceline_kernels.scaled_linear import ScaledWeight, scaled_linear
from paceline_kernels.scaled_linear.triton import round_rows

_INPUTS = 4096
_FEWEST_TOKENS = 16  # of a tile


def cases(architecture: Architecture, *, has_fp8: bool) -> Iterator[Case]:
    """Both kernels, and the one that rounds rows of x; the smallest sizes with float16."""
    yield _case(1, 2048, torch.float16, Splits.EVEN, torch.float16)
    for num_tokens, num_outputs in ((8, 4096), (16, 6144)):
        yield _case(num_tokens, num_outputs, torch.bfloat16, Splits.EVEN)
    yield _case(8, 2048, torch.int8, Splits.EVEN, torch.float16)
    for num_tokens, num_outputs in ((8, 4096), (32, 4096), (32, 16_384)):
        yield _case(num_tokens, num_outputs, torch.int8, Splits.EVEN)
    for weight_type in (torch.bfloat16, torch.int8):
        for launch in TILES[architecture, weight_type.itemsize].values():
            dtype = torch.float16 if launch.tokens == _FEWEST_TOKENS else torch.bfloat16
            own_type = dtype if weight_type.itemsize == dtype.itemsize else weight_type
            yield _case(_rows_for(launch), 4096, own_type, Splits.FIXED, dtype)
    if has_fp8:
        yield _case(8, 4096, torch.float8_e4m3fn, Splits.EVEN, torch.float16)
        yield _case(32, 28_672, torch.float8_e4m3fn, Splits.EVEN)
        yield _case(2048, 4096, torch.float8_e4m3fn, Splits.FIXED)
        yield Case("round rows", partial(round_rows, meta(2048, _INPUTS)))


def _rows_for(launch: TilesLaunch) -> int:
    """Up to 64 as many as a tile has; larger tiles are for many more."""
    return launch.tokens if launch.tokens <= 64 else launch.tokens * 8


def _case(
    num_tokens: int,
    num_outputs: int,
    weight_type: torch.dtype,
    splits: Splits,
    dtype: torch.dtype = torch.bfloat16,
) -> Case:
    types = dict.fromkeys(type_name(named) for named in (weight_type, dtype))
    name = f"linear {num_tokens} by {num_outputs} {' '.join(types)} {splits.value}"
    x, bias = meta(num_tokens, _INPUTS, dtype=dtype), meta(num_outputs, dtype=dtype)
    values = meta(num_outputs, _INPUTS, dtype=weight_type)
    if weight_type == dtype:
        return Case(name, partial(linear, x, values, bias, splits=splits))
    weight = ScaledWeight(values, meta(num_outputs, dtype=torch.float32))
    return Case(name, partial(scaled_linear, x, weight, splits=splits))

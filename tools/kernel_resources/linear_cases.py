"""Every way in which matrix products are launched: each line of both launch tables, and the sizes of few rows.

Compiling one of them takes seconds, so of what shares a line only that is compiled which needs most.
"""

from collections.abc import Iterator
from functools import partial

import torch

from kernel_resources.case import Case, meta
from paceline_kernels.gpu.architecture import Architecture
from paceline_kernels.linear import Splits, linear
from paceline_kernels.linear.triton.launches import TILES, TilesLaunch
from paceline_kernels.scaled_linear import ScaledWeight, scaled_linear
from paceline_kernels.scaled_linear.triton import round_rows

_INPUTS = 4096


def cases(architecture: Architecture) -> Iterator[Case]:
    """Both kernels, and the one that rounds rows of x."""
    is_fp8 = architecture >= Architecture.SM_90
    for num_tokens, num_outputs in ((1, 2048), (8, 4096), (16, 6144)):
        yield _case(num_tokens, num_outputs, torch.bfloat16, Splits.EVEN)
    for num_tokens, num_outputs in ((8, 2048), (8, 4096), (32, 4096), (32, 16_384)):
        yield _case(num_tokens, num_outputs, torch.int8, Splits.EVEN)
    for weight_type in (torch.bfloat16, torch.int8):
        for launch in TILES[architecture, weight_type.itemsize].values():
            yield _case(_rows_for(launch), 4096, weight_type, Splits.FIXED)
    if is_fp8:
        yield _case(8, 4096, torch.float8_e4m3fn, Splits.EVEN)
        yield _case(32, 28_672, torch.float8_e4m3fn, Splits.EVEN)
        yield _case(2048, 4096, torch.float8_e4m3fn, Splits.FIXED)
        yield Case("round rows", partial(round_rows, meta(2048, _INPUTS)))


def _rows_for(launch: TilesLaunch) -> int:
    """Up to 64 as many as a tile has; larger tiles are for many more."""
    return launch.tokens if launch.tokens <= 64 else launch.tokens * 8


def _case(num_tokens: int, num_outputs: int, weight_type: torch.dtype, splits: Splits) -> Case:
    type_name = str(weight_type).removeprefix("torch.")
    name = f"linear {num_tokens} by {num_outputs} {type_name} {splits.value}"
    x, values, bias = meta(num_tokens, _INPUTS), meta(num_outputs, _INPUTS, dtype=weight_type), meta(num_outputs)
    if weight_type == torch.bfloat16:
        return Case(name, partial(linear, x, values, bias, splits=splits))
    weight = ScaledWeight(values, meta(num_outputs, dtype=torch.float32))
    return Case(name, partial(scaled_linear, x, weight, splits=splits))

"""scaled_linear for GPUs: which product for how many rows, and rows of x made as small as the weights for the library.

Knows sizes and types. The kernels that widen weights are those of `linear`.
"""

import torch
import triton
import triton.language as tl
from torch.nn import functional

from paceline_kernels.gpu import architecture
from paceline_kernels.gpu.architecture import Architecture
from paceline_kernels.gpu.splits import Splits
from paceline_kernels.linear.triton.few_rows import launch_few_rows
from paceline_kernels.linear.triton.launches import MAX_FEW_ROWS_SCALED
from paceline_kernels.linear.triton.tiles import launch_tiles
from paceline_kernels.scaled_linear.weights import ScaledWeight

# With fewer rows the library's product takes as long as one that widens weights, and the rows have to be rounded first.
# (4096 x 4096: 10.8 us at 64 rows and 13.5 at 128, where 16.8 MB of weights come in 3.9 us.)
LIBRARY_FROM_ROWS = 65
# What the library's instructions ask of both sides of a matrix of 8-bit numbers.
_MULTIPLE = 16
# Numbers of a row that a program of four warps has at a time: four 16-byte loads of 16-bit numbers per thread.
_BLOCK, _NUM_WARPS = 4096, 4
_LARGEST_FLOAT8 = tl.constexpr(448.0)
# The quotient of a row with less would be infinite; such rows count as zeros.
_SMALLEST = tl.constexpr(1e-30)


def scaled_linear(x: torch.Tensor, weight: ScaledWeight, bias: torch.Tensor | None, splits: Splits) -> torch.Tensor:
    architecture.check_fp8("scaled_linear", weight.values)
    if splits is Splits.EVEN and x.shape[0] <= MAX_FEW_ROWS_SCALED:
        return launch_few_rows(x, weight.values, weight.scales, bias)
    if splits is Splits.EVEN and _library_has(x, weight.values):
        return _multiply_rounded(x, weight, bias)
    return launch_tiles(x, weight.values, weight.scales, bias)


def _library_has(x: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether torch multiplies such numbers with a scale per row and per output, and fast."""
    return (
        values.dtype == torch.float8_e4m3fn
        and x.dtype == torch.bfloat16
        and x.shape[0] >= LIBRARY_FROM_ROWS
        and all(size and size % _MULTIPLE == 0 for size in values.shape)
        and architecture.current() >= Architecture.SM_90
    )


def _multiply_rounded(x: torch.Tensor, weight: ScaledWeight, bias: torch.Tensor | None) -> torch.Tensor:
    rounded, scales = round_rows(x)
    # Sums of 14 bits: what they lose is less than what rounding to 4 bits does, and they are a third faster.
    by_row = functional.ScalingType.RowWise
    return functional.scaled_mm(
        rounded,
        weight.values.t(),
        scales,
        by_row,
        weight.scales[None],
        by_row,
        bias=bias,
        output_dtype=x.dtype,
        use_fast_accum=True,
    )


def round_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(numbers [num_tokens, in] float8_e4m3fn, scales [num_tokens, 1] float32): x is their product, nearly.

    A row's scale is its largest magnitude over that of the type; a row of zeros has the scale 1.
    """
    numbers = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((x.shape[0], 1), dtype=torch.float32, device=x.device)
    round_rows_kernel[(x.shape[0],)](numbers, scales, x, x.shape[1], _BLOCK, num_warps=_NUM_WARPS)
    return numbers, scales


@triton.jit
def round_rows_kernel(numbers, scales, x, width, BLOCK: tl.constexpr):
    """A program per row of x [rows, width], which it reads twice, the second time from the second level."""
    row = tl.program_id(0).to(tl.int64)
    largest = 0.0
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        part = tl.load(x + row * width + columns, mask=columns < width, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(part), 0))
    largest = tl.where(largest > _SMALLEST, largest, _LARGEST_FLOAT8)
    # Times a constant, because `/` may be off by two units in the last place.
    tl.store(scales + row, largest * (1.0 / _LARGEST_FLOAT8))
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        part = tl.load(x + row * width + columns, mask=columns < width, other=0.0).to(tl.float32)
        number = (part * (_LARGEST_FLOAT8 / largest)).to(tl.float8e4nv)
        tl.store(numbers + row * width + columns, number, mask=columns < width)

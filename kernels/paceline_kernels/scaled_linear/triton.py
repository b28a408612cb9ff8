"""scaled_linear for GPUs: which product for how many rows, and rows of x made as small as the weights for many.

Knows sizes and types. The kernels that multiply are those of `linear`, and the library's.
"""

import torch
import triton
import triton.language as tl
from torch.nn import functional

from paceline_kernels.gpu import architecture
from paceline_kernels.gpu.architecture import Architecture
from paceline_kernels.gpu.rounded_rows import RoundedRows, unwritten_rows
from paceline_kernels.gpu.splits import Splits
from paceline_kernels.gpu.triton import largest_bits, rounded, scale_row
from paceline_kernels.linear.triton.few_rows import launch_few_rows
from paceline_kernels.linear.triton.launches import MAX_FEW_ROWS_SCALED
from paceline_kernels.linear.triton.tiles import launch_tiles
from paceline_kernels.scaled_linear.weights import ScaledWeight

# With fewer rows the library's product takes as long as one that widens weights, and the rows have to be rounded first.
# (4096 x 4096: 10.8 us at 64 rows and 13.5 at 128, where 16.8 MB of weights come in 3.9 us.)
ROUNDED_FROM_ROWS = 65
# What the library's instructions ask of both sides of a matrix of 8-bit numbers.
_MULTIPLE = 16
# Of products of int8: as many sums of 32 bits hold.
_MAX_INPUTS = 1 << 17
# Numbers of a row that a program of four warps has at a time: four 16-byte loads of 16-bit numbers per thread.
_BLOCK, _NUM_WARPS = 4096, 4


def scaled_linear(
    x: torch.Tensor | RoundedRows, weight: ScaledWeight, bias: torch.Tensor | None, splits: Splits
) -> torch.Tensor:
    architecture.check_fp8("scaled_linear", weight.values)
    if isinstance(x, RoundedRows):
        return _multiply_rounded(x, weight, bias)
    rounded_to = rounded_type(x.shape[0], x.dtype, weight, splits)
    if rounded_to is not None:
        return _multiply_rounded(round_rows(x, rounded_to), weight, bias)
    if splits is Splits.EVEN and x.shape[0] <= MAX_FEW_ROWS_SCALED:
        return launch_few_rows(x, weight.values, weight.scales, bias)
    return launch_tiles(x, weight.values, weight.scales, bias)


def rounded_type(num_tokens: int, dtype: torch.dtype, weight: ScaledWeight, splits: Splits) -> torch.dtype | None:
    kind, sizes = weight.values.dtype, weight.values.shape
    if splits is not Splits.EVEN or num_tokens < ROUNDED_FROM_ROWS or not all(sizes):
        return None
    if kind == torch.int8:
        return kind if sizes[1] <= _MAX_INPUTS else None
    has_library = dtype == torch.bfloat16 and architecture.current() >= Architecture.SM_90
    return kind if has_library and not any(size % _MULTIPLE for size in sizes) else None


def _multiply_rounded(x: RoundedRows, weight: ScaledWeight, bias: torch.Tensor | None) -> torch.Tensor:
    if x.numbers.dtype == torch.int8:
        return launch_tiles(x, weight.values, weight.scales, bias)
    # Sums of 14 bits: what they lose is less than what rounding to 4 bits does, and they are a third faster.
    by_row = functional.ScalingType.RowWise
    return functional.scaled_mm(
        x.numbers,
        weight.values.t(),
        x.scales,
        by_row,
        weight.scales[None],
        by_row,
        bias=bias,
        output_dtype=x.dtype,
        use_fast_accum=True,
    )


def round_rows(x: torch.Tensor, rounded_to: torch.dtype) -> RoundedRows:
    """x: [num_tokens, in]. rounded_to: float8_e4m3fn or int8."""
    rows = unwritten_rows(x, x.shape[1], rounded_to)
    round_rows_kernel[(x.shape[0],)](rows.numbers, rows.scales, x, x.shape[1], _BLOCK, num_warps=_NUM_WARPS)
    return rows


@triton.jit
def round_rows_kernel(numbers, scales, x, width, BLOCK: tl.constexpr):
    """A program per row of x [rows, width], which it reads twice, the second time from the second level."""
    row = tl.program_id(0).to(tl.int64)
    bits = 0
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        part = tl.load(x + row * width + columns, mask=columns < width, other=0.0).to(tl.float32)
        bits = tl.maximum(bits, largest_bits(part))
    factor = scale_row(bits, scales, row, numbers.dtype.element_ty)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        part = tl.load(x + row * width + columns, mask=columns < width, other=0.0).to(tl.float32)
        number = rounded(part, factor, numbers.dtype.element_ty)
        tl.store(numbers + row * width + columns, number, mask=columns < width)

"""linear for CPUs: weights are streamed once, in the order they are stored, past a block of rows held in the cache.

Knows nothing but the two matrices. Batch-invariant by construction: every output element is one `simd` dot product, or
a tree of those of its slices, and neither tiles nor threads split it. (The library behind torch's product is not: it
picks another kernel, hence another order of summation, for every few rows more.)
"""

import numba
import numpy as np
import numpy.typing as npt
import torch

from paceline_kernels.compiler import jit
from paceline_kernels.vector import simd

# Rows of x that are multiplied with one group of weight rows before the next group is fetched: as many as fit into
# 192 KiB, which leaves room in a second-level cache of 512 KiB.
_ROW_BLOCK_FLOATS = 48 * 1024


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, slices: int) -> torch.Tensor:
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=torch.float32)
    multiply(x.numpy(), weight.numpy(), out.numpy(), None if slices == 1 else slices, jit.num_threads())
    if bias is not None:
        np.add(out.numpy(), bias.numpy(), out=out.numpy())
    return out


def slice_products(x: torch.Tensor, weight: torch.Tensor, slices: int) -> torch.Tensor:
    """What `linear` with so many slices has not added yet: [slices, num_tokens, out]."""
    out = torch.empty((slices, x.shape[0], weight.shape[0]), dtype=torch.float32)
    multiply_slices(x.numpy(), weight.numpy(), out.numpy(), jit.num_threads())
    return out


def sum_of_slices(partials: torch.Tensor) -> torch.Tensor:
    sums = list(partials.numpy())
    while len(sums) > 1:
        pairs = [one + other for one, other in zip(sums[::2], sums[1::2], strict=False)]
        sums = pairs + sums[2 * len(pairs) :]
    return torch.from_numpy(sums[0])


@jit.compiled_parallel
def multiply(
    x: npt.NDArray[np.float32],
    weight: npt.NDArray[np.float32],
    out: npt.NDArray[np.float32],
    slices: int | None,
    num_workers: int,
) -> None:
    """out = x times the transpose of weight; each worker takes a range of the output columns."""
    num_rows, length = x.shape
    num_columns = weight.shape[0]
    # Ranges are multiples of four columns, the width of a tile.
    columns_each = ((num_columns + 3) // 4 + num_workers - 1) // num_workers * 4
    rows_each = max(3, _ROW_BLOCK_FLOATS // max(length, 1) // 3 * 3)
    x_start, w_start, out_start = simd.address(x), simd.address(weight), simd.address(out)
    for worker in numba.prange(num_workers):
        first = worker * columns_each
        columns = min(num_columns, first + columns_each) - first
        for row in range(0, num_rows, rows_each):
            simd.dot_rows(
                x_start + simd.FLOAT_BYTES * row * length,
                length,
                min(rows_each, num_rows - row),
                w_start + simd.FLOAT_BYTES * first * length,
                length,
                columns,
                length if slices is None else length // slices,
                slices,
                out_start + simd.FLOAT_BYTES * (row * num_columns + first),
                num_columns,
                weight,
            )


@jit.compiled_parallel
def multiply_slices(
    x: npt.NDArray[np.float32], weight: npt.NDArray[np.float32], out: npt.NDArray[np.float32], num_workers: int
) -> None:
    """As `multiply` does; slices of one tile come one after another, so that weights are streamed in their order."""
    num_rows, length = x.shape
    slices, _, num_columns = out.shape
    width = length // slices
    columns_each = ((num_columns + 3) // 4 + num_workers - 1) // num_workers * 4
    rows_each = max(3, _ROW_BLOCK_FLOATS // max(length, 1) // 3 * 3)
    x_start, w_start, out_start = simd.address(x), simd.address(weight), simd.address(out)
    for worker in numba.prange(num_workers):
        end = min(num_columns, (worker + 1) * columns_each)
        for row in range(0, num_rows, rows_each):
            for column in range(worker * columns_each, end, 4):
                for part in range(slices):
                    simd.dot_rows(
                        x_start + simd.FLOAT_BYTES * (row * length + part * width),
                        length,
                        min(rows_each, num_rows - row),
                        w_start + simd.FLOAT_BYTES * (column * length + part * width),
                        length,
                        min(4, end - column),
                        width,
                        None,
                        out_start + simd.FLOAT_BYTES * ((part * num_rows + row) * num_columns + column),
                        num_columns,
                        weight,
                    )

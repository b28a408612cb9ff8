"""quantized_linear for CPUs: rows are made int8 group by group, then multiplied tile by tile.

Knows addresses of packed groups. What one output is the sum of stands in `tiles`, the layout in `packing`.
"""

import numba
import numpy as np
import numpy.typing as npt
import torch

from paceline_kernels.compiler import jit
from paceline_kernels.compiler.jit import Float32
from paceline_kernels.errors import KernelArgumentError
from paceline_kernels.quantized_linear import tiles
from paceline_kernels.quantized_linear.packing import (
    GROUP,
    INT4_COLUMNS,
    INT4_QUADS,
    INT8_COLUMNS,
    INT8_QUADS,
    KIND_BITS,
    TILE,
    PackedWeight,
    WeightFormat,
)
from paceline_kernels.vector import simd
from paceline_kernels.vector.integers import largest_magnitude, round_to_int8

_Float32Array = npt.NDArray[np.float32]
_INT8, _INT4_ZEROS = int(WeightFormat.INT8), int(WeightFormat.INT4_ZEROS)
_KINDS = (1 << KIND_BITS) - 1
_ZERO = np.float32(0.0)
_MAX_INT8 = np.float32(127.0)
# Below this the factor would not be finite: such a group counts as zeros.
_SMALLEST = np.float32(1e-30)


def quantized_linear(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    num_rows, num_outputs = x.shape[0], weight.num_outputs
    out = torch.empty((num_rows, -(-num_outputs // TILE) * TILE), dtype=torch.float32)
    multiply(x.numpy(), weight.data.numpy(), weight.code, out.numpy(), jit.num_threads())
    return out[:, :num_outputs].contiguous()


def unpack_rows(weight: PackedWeight, indices: torch.Tensor) -> torch.Tensor:
    rows = indices.numpy()
    if rows.size and not (rows.min() >= 0 and rows.max() < weight.num_outputs):
        raise KernelArgumentError("unpack_rows", f"indices must be 0 to {weight.num_outputs - 1}")
    out = torch.empty((rows.size, weight.num_inputs), dtype=torch.float32)
    unpack_many(weight.data.numpy(), weight.code, rows, out.numpy())
    return out


@jit.compiled
def tile_bytes(code: int, num_groups: int) -> int:
    """The size of a tile. code: of a PackedWeight, here and below."""
    num_spans = ((num_groups - 1) >> (code >> KIND_BITS)) + 1
    if code & _KINDS == _INT8:
        return num_groups * INT8_QUADS + num_spans * INT8_COLUMNS
    return num_groups * INT4_QUADS + num_spans * INT4_COLUMNS


@jit.compiled
def quantize_span(x: int, count: int, out: int) -> tuple[Float32, Float32]:
    """Make `count` floats, a multiple of 8, int8 under one scale; returns the scale and the sum of the integers.

    A NaN or an infinity makes the scale one, and so everything that is computed with it.
    """
    largest = largest_magnitude(x, count)
    if largest < _SMALLEST:
        round_to_int8(x, count, _ZERO, out)
        return _ZERO, _ZERO
    total = round_to_int8(x, count, _MAX_INT8 / largest, out)
    return largest / _MAX_INT8, np.float32(total)


@jit.compiled
def quantize_groups(x: int, num_groups: int, out: int, scales: int, sums: int) -> None:
    """Make a row's groups int8: x float32, out int8, scales and sums float32 per group; all addresses."""
    for group in range(num_groups):
        scale, total = quantize_span(x + simd.FLOAT_BYTES * GROUP * group, GROUP, out + GROUP * group)
        simd.put(scales, group, scale)
        simd.put(sums, group, total)


@jit.compiled
def dot_tiles(
    code: int,
    x: int,
    num_rows: int,
    scales: int,
    sums: int,
    w: int,
    num_tiles: int,
    num_groups: int,
    out: int,
    out_stride: int,
) -> None:
    """out[i, :16 * num_tiles] = x[i] · w, for `num_rows` quantised rows that follow each other in memory."""
    tile, size = 0, tile_bytes(code, num_groups)
    while tile < num_tiles:
        width = tiles.WIDTH if num_tiles - tile >= tiles.WIDTH else 1
        weights = (w + tile * size, size, num_groups)
        row = 0
        while row < num_rows:
            first = simd.FLOAT_BYTES * row * num_groups
            rows = (x + row * num_groups * GROUP, num_groups * GROUP, scales + first, sums + first, num_groups)
            target = out + simd.FLOAT_BYTES * (row * out_stride + tile * TILE)
            row += _dot_some(code, num_rows - row, width, rows, weights, target, out_stride)
        tile += width


@jit.compiled
def _dot_some(
    code: int,
    num_rows: int,
    width: int,
    rows: tuple[int, int, int, int, int],
    weights: tuple[int, int, int],
    out: int,
    out_stride: int,
) -> int:
    """One operation, for as many of the rows as it takes; returns how many. Rows and weights are its arguments."""
    arguments, kind, count = (*rows, *weights, out, out_stride, code >> KIND_BITS), code & _KINDS, 1
    if width < tiles.WIDTH:
        if kind == _INT8:
            tiles.int8_single(*arguments)
        elif kind == _INT4_ZEROS:
            tiles.zeros_single(*arguments)
        else:
            tiles.int4_single(*arguments)
    elif num_rows >= tiles.MOST_ROWS:
        count = tiles.MOST_ROWS
        if kind == _INT8:
            tiles.int8_most(*arguments)
        elif kind == _INT4_ZEROS:
            tiles.zeros_most(*arguments)
        else:
            tiles.int4_most(*arguments)
    elif num_rows >= tiles.SOME_ROWS:
        count = tiles.SOME_ROWS
        if kind == _INT8:
            tiles.int8_some(*arguments)
        elif kind == _INT4_ZEROS:
            tiles.zeros_some(*arguments)
        else:
            tiles.int4_some(*arguments)
    elif kind == _INT8:
        tiles.int8_one(*arguments)
    elif kind == _INT4_ZEROS:
        tiles.zeros_one(*arguments)
    else:
        tiles.int4_one(*arguments)
    return count


@jit.compiled
def unpack_row(data: npt.NDArray[np.uint8], code: int, row: int, out: _Float32Array) -> None:
    """out [num_inputs] = row `row` of the matrix, as float32."""
    tile, lane, kind, shift, at = data[row // TILE], row % TILE, code & _KINDS, code >> KIND_BITS, 0
    scale, minimum = _ZERO, _ZERO
    for group in range(out.shape[0] // GROUP):
        if group == group >> shift << shift:
            scale = _half(tile[at:], lane)
            if kind != _INT8:
                second = _half(tile[at:], TILE + lane)
                minimum = -(scale * second) if kind == _INT4_ZEROS else second
            at += INT8_COLUMNS if kind == _INT8 else INT4_COLUMNS
        packed = tile[at:]
        if kind == _INT8:
            for i in range(GROUP):
                integer = np.int8(packed[i // 4 * 64 + lane // 8 * 32 + lane % 8 * 4 + i % 4])
                out[group * GROUP + i] = scale * np.float32(integer)
        else:
            for i in range(GROUP):
                both = packed[i // 4 * 32 + lane % 8 * 4 + i % 4]
                integer = both & np.uint8(15) if lane < 8 else both >> np.uint8(4)
                out[group * GROUP + i] = scale * np.float32(integer) + minimum
        at += INT8_QUADS if kind == _INT8 else INT4_QUADS


@jit.compiled
def _half(columns: npt.NDArray[np.uint8], index: int) -> Float32:
    return simd.half(simd.address(columns) + 2 * index)


@jit.compiled_for_python
def unpack_many(data: npt.NDArray[np.uint8], code: int, rows: npt.NDArray[np.int32], out: _Float32Array) -> None:
    """out [num_rows, num_inputs] = these rows of the matrix."""
    for i in range(rows.shape[0]):
        unpack_row(data, code, rows[i], out[i])


@jit.compiled_parallel
def multiply(x: _Float32Array, data: npt.NDArray[np.uint8], code: int, out: _Float32Array, num_workers: int) -> None:
    """out = x times the transpose of the weight; each worker takes a range of tiles. out's rows are whole tiles."""
    num_rows, num_tiles, num_groups = x.shape[0], data.shape[0], x.shape[1] // GROUP
    integers = np.empty((num_rows, num_groups * GROUP), dtype=np.int8)
    scales = np.empty((num_rows, num_groups), dtype=np.float32)
    sums = np.empty((num_rows, num_groups), dtype=np.float32)
    for row in range(num_rows):
        addresses = (simd.address(integers[row]), simd.address(scales[row]), simd.address(sums[row]))
        quantize_groups(simd.address(x[row]), num_groups, *addresses)
    at_data, at_out, stride = simd.address(data), simd.address(out), out.shape[1]
    for worker in numba.prange(num_workers):
        # Inside, because arrays live only as long as something names them: an address does not.
        at_x, at_scales, at_sums = simd.address(integers), simd.address(scales), simd.address(sums)
        first, end = num_tiles * worker // num_workers, num_tiles * (worker + 1) // num_workers
        w, target = at_data + first * data.shape[1], at_out + simd.FLOAT_BYTES * TILE * first
        dot_tiles(code, at_x, num_rows, at_scales, at_sums, w, end - first, num_groups, target, stride)

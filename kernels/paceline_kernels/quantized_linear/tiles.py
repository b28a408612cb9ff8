"""Dot products of int8 activations with packed weights, as LLVM instructions: sixteen outputs of a few rows at a time.

Knows the byte layout of a packed group's scales (`packing` writes it) and nothing of matrices.

Inputs come in groups of 32. Lane c of a vector is an output. Inside a group everything is integer, hence exact in any
order (`group_sums`). Over the groups each output adds, in ascending order, in float32 and with fused multiply-adds:

    total = total + (weight scale * integer sum) * row scale
    total = total + (weight scale * integer sum + weight minimum * row sum) * row scale     (formats with minima)

The row sum is that of the row's integers in the group.

That chain is the same for every tile size and every processor, so an output has the same bits alone and among any
number of rows.
"""

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types

from paceline_kernels.compiler.llvm import (
    FLOAT,
    HALF,
    INT8,
    Ir,
    constant,
    fma,
    load,
    load_floats,
    loop,
    operation,
    pointers,
    prefetch_line,
    splat,
    store,
)
from paceline_kernels.quantized_linear.group_sums import GroupSums
from paceline_kernels.quantized_linear.packing import GROUP, TILE
from paceline_kernels.vector.integers import Processor, this_processor

INT4_GROUP_BYTES = GROUP * TILE // 2 + 2 * 2 * TILE
INT8_GROUP_BYTES = GROUP * TILE + 2 * TILE

_HALF_BYTES = 2
_LINE_BYTES = 64


class _Plan(NamedTuple):
    """How the tiles of a processor are cut."""

    rows: tuple[int, int, int]  # of an operation: as many as registers hold the sums of, and fewer for the rest
    width: int  # tiles of an operation
    ahead_bytes: int  # how far before their use weights are asked for; 0: they are not


# Two tiles share what is loaded of a row, which otherwise costs VNNI as much time as its products. Its products are so
# fast that few rows wait for weights; those of AVX2 leave no time to ask for any.
_PLANS = {
    Processor.PORTABLE: _Plan((4, 2, 1), 1, 0),
    Processor.AVX2: _Plan((4, 2, 1), 1, 0),
    Processor.VNNI: _Plan((6, 2, 1), 2, 16384),
}


class _Columns:
    """The scales and minima of a group's outputs, a vector after the other, tile after tile."""

    def __init__(self, builder: Ir, tiles: list[Ir], start: Ir, floats: Ir, bits: int) -> None:
        halves = [builder.bitcast(builder.gep(tile, [start]), HALF.as_pointer()) for tile in tiles]
        is_int4, scales_at = bits == 4, (INT4_GROUP_BYTES if bits == 4 else INT8_GROUP_BYTES) // _HALF_BYTES - TILE

        def load_all(first: int) -> list[Ir]:
            places = [constant(first + lane) for lane in range(0, TILE, floats.count)]
            return [load_floats(builder, half, place, floats) for half in halves for place in places]

        self.scales = load_all(scales_at - TILE if is_int4 else scales_at)
        self.minima = load_all(scales_at) if is_int4 else []


def _ask_for(builder: Ir, tiles: list[Ir], start: Ir, count: int) -> None:
    """Ask for so many bytes of every tile."""
    for tile in tiles:
        for line in range(0, count, _LINE_BYTES):
            prefetch_line(builder, tile, builder.add(start, constant(line)))


def dot_tile(num_rows: int, num_tiles: int, bits: int, processor: Processor) -> Any:  # noqa: ANN401
    """An operation out[i, :16 * num_tiles] = x[i] · w for `num_rows` rows and some tiles, of 4 or 8 bits per weight.

    Its arguments: x and its stride, the rows' scales and sums and their stride, w, the bytes from tile to tile, the
    number of groups, out and its stride; addresses in bytes, other strides in elements.
    """
    group_bytes, ahead_bytes = INT4_GROUP_BYTES if bits == 4 else INT8_GROUP_BYTES, _PLANS[processor].ahead_bytes

    @operation(types.void, *[types.int64] * 10)
    def tile(
        builder: Ir,
        x: Ir,
        x_stride: Ir,
        scales: Ir,
        sums: Ir,
        row_stride: Ir,
        w: Ir,
        w_stride: Ir,
        num_groups: Ir,
        out: Ir,
        out_stride: Ir,
    ) -> None:
        group_sums = GroupSums(builder, processor, bits)
        xs = pointers(builder, x, x_stride, num_rows, INT8)
        row_scales, row_sums = (pointers(builder, start, row_stride, num_rows) for start in (scales, sums))
        tiles = pointers(builder, w, w_stride, num_tiles, INT8)
        floats = ir.VectorType(FLOAT, group_sums.lanes)
        excess = ir.Constant(floats, [-float(group_sums.excess)] * floats.count)
        per_row = group_sums.vectors * num_tiles

        def add_group(group: Ir, totals: list[Ir]) -> list[Ir]:
            start = builder.mul(group, constant(group_bytes))
            _ask_for(builder, tiles, builder.add(start, constant(ahead_bytes)), group_bytes if ahead_bytes else 0)
            integers = group_sums.emit(tiles, start, xs, builder.mul(group, constant(GROUP)))
            columns = _Columns(builder, tiles, start, floats, bits)
            following = []
            for i in range(num_rows):
                scale, row_sum = (
                    splat(builder, load(builder, of_rows[i], group, FLOAT), floats)
                    for of_rows in (row_scales, row_sums)
                )
                for j in range(per_row):
                    exact = builder.sitofp(integers[per_row * i + j], floats)
                    if group_sums.excess:
                        exact = fma(builder, row_sum, excess, exact)
                    product = builder.fmul(columns.scales[j], exact)
                    if columns.minima:
                        below = builder.fmul(columns.minima[j], row_sum)
                        product = fma(builder, columns.scales[j], exact, below)
                    following.append(fma(builder, product, scale, totals[per_row * i + j]))
            return following

        zeros = [ir.Constant(floats, [0.0] * floats.count)] * (per_row * num_rows)
        totals = loop(builder, constant(0), num_groups, 1, zeros, add_group)
        for i, row in enumerate(pointers(builder, out, out_stride, num_rows)):
            for j in range(per_row):
                store(builder, totals[per_row * i + j], row, constant(floats.count * j))

    return tile


_THIS = this_processor()
_PLAN = _PLANS[_THIS]
(MOST_ROWS, SOME_ROWS, _), WIDTH = _PLAN.rows, _PLAN.width
int4_most, int4_some, int4_one = (dot_tile(rows, WIDTH, 4, _THIS) for rows in _PLAN.rows)
int8_most, int8_some, int8_one = (dot_tile(rows, WIDTH, 8, _THIS) for rows in _PLAN.rows)
# Where fewer tiles than that are left.
int4_single, int8_single = (dot_tile(1, 1, bits, _THIS) for bits in (4, 8))

"""Dot products of int8 activations with packed weights, as LLVM instructions: sixteen outputs of a few rows at a time.

Knows the byte layout of a packed group's scales (`packing` writes it) and nothing of matrices.

Inputs come in groups of 32; weights have scales for spans of one or more. Lane c of a vector is an output. Inside a
group everything is integer, hence exact in any order (`group_sums`). Over the groups each output adds, in ascending
order, in float32 and with fused multiply-adds:

    total = total + (weight scale * integer sum) * row scale
    total = total + (weight scale * integer sum + weight minimum * row sum) * row scale     (formats with minima)

The row sum is that of the row's integers in the group. Of zero points the minimum is -(weight scale * zero), exact in
float32.

That chain is the same for every tile size and every processor, so an output has the same bits alone and among any
number of rows.
"""

from functools import partial
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
from paceline_kernels.quantized_linear.packing import (
    GROUP,
    INT4_COLUMNS,
    INT4_QUADS,
    INT8_COLUMNS,
    INT8_QUADS,
    TILE,
    WeightFormat,
)
from paceline_kernels.vector.integers import Processor, this_processor

_LINE_BYTES = 64
_SIZES = {  # bits of a weight; bytes of a group and of a span's columns
    WeightFormat.INT4: (4, INT4_QUADS, INT4_COLUMNS),
    WeightFormat.INT4_ZEROS: (4, INT4_QUADS, INT4_COLUMNS),
    WeightFormat.INT8: (8, INT8_QUADS, INT8_COLUMNS),
}


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
    """The scales and minima of a span's outputs, a vector after the other, tile after tile."""

    def __init__(self, builder: Ir, tiles: list[Ir], start: Ir, floats: Ir, weight_format: WeightFormat) -> None:
        halves = [builder.bitcast(builder.gep(tile, [start]), HALF.as_pointer()) for tile in tiles]

        def load_all(first: int) -> list[Ir]:
            places = [constant(first + lane) for lane in range(0, TILE, floats.count)]
            return [load_floats(builder, half, place, floats) for half in halves for place in places]

        self.scales = load_all(0)
        self.minima = [] if weight_format is WeightFormat.INT8 else load_all(TILE)
        if weight_format is WeightFormat.INT4_ZEROS:
            pairs = zip(self.scales, self.minima, strict=True)
            self.minima = [builder.fneg(builder.fmul(scale, zero)) for scale, zero in pairs]

    def added(self, builder: Ir, total: Ir, place: int, exact: Ir, row_sum: Ir, row_scale: Ir) -> Ir:
        """The total of a vector of outputs after a group's sums: see the chain above."""
        product = builder.fmul(self.scales[place], exact)
        if self.minima:
            below = builder.fmul(self.minima[place], row_sum)
            product = fma(builder, self.scales[place], exact, below)
        return fma(builder, product, row_scale, total)


def _ask_for(builder: Ir, tiles: list[Ir], start: Ir, ahead_bytes: int, count: int) -> None:
    """Ask for so many bytes of every tile, so far ahead; not at all if that is 0."""
    for tile in tiles if ahead_bytes else ():
        for line in range(0, count, _LINE_BYTES):
            prefetch_line(builder, tile, builder.add(start, constant(ahead_bytes + line)))


def _places(builder: Ir, group: Ir, span: Ir, quads: int, columns_bytes: int) -> tuple[Ir, Ir]:
    """Where in a tile a group, and the columns of its span, begin."""
    number = builder.lshr(group, span)
    before = builder.mul(number, constant(columns_bytes))
    columns_at = builder.add(before, builder.mul(builder.shl(number, span), constant(quads)))
    return builder.add(builder.mul(group, constant(quads)), builder.add(before, constant(columns_bytes))), columns_at


def dot_tile(num_rows: int, num_tiles: int, weight_format: WeightFormat, processor: Processor) -> Any:  # noqa: ANN401
    """An operation out[i, :16 * num_tiles] = x[i] · w for `num_rows` rows and some tiles.

    w_stride: bytes from tile to tile; other strides are in elements. span: the logarithm of its groups.
    """
    bits, quads, columns_bytes = _SIZES[weight_format]

    @operation(types.void, *[types.int64] * 11)
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
        span: Ir,
    ) -> None:
        group_sums = GroupSums(builder, processor, bits)
        xs = pointers(builder, x, x_stride, num_rows, INT8)
        row_scales, row_sums = (pointers(builder, start, row_stride, num_rows) for start in (scales, sums))
        tiles = pointers(builder, w, w_stride, num_tiles, INT8)
        floats = ir.VectorType(FLOAT, group_sums.lanes)
        excess = ir.Constant(floats, [-float(group_sums.excess)] * floats.count)
        per_row = group_sums.vectors * num_tiles

        def add_group(group: Ir, totals: list[Ir], span: Ir) -> list[Ir]:
            start, columns_at = _places(builder, group, span, quads, columns_bytes)
            _ask_for(builder, tiles, start, _PLANS[processor].ahead_bytes, quads + columns_bytes)
            integers = group_sums.emit(tiles, start, xs, builder.mul(group, constant(GROUP)))
            columns = _Columns(builder, tiles, columns_at, floats, weight_format)
            following: list[Ir] = []
            for i in range(num_rows):
                numbers = (load(builder, each[i], group, FLOAT) for each in (row_scales, row_sums))
                scale, row_sum = (splat(builder, number, floats) for number in numbers)
                for j in range(per_row):
                    exact = builder.sitofp(integers[per_row * i + j], floats)
                    if group_sums.excess:
                        exact = fma(builder, row_sum, excess, exact)
                    following.append(columns.added(builder, totals[per_row * i + j], j, exact, row_sum, scale))
            return following

        def add_groups(span: Ir) -> None:
            zeros = [ir.Constant(floats, [0.0] * floats.count)] * (per_row * num_rows)
            totals = loop(builder, constant(0), num_groups, 1, zeros, partial(add_group, span=span))
            for i, row in enumerate(pointers(builder, out, out_stride, num_rows)):
                for j in range(per_row):
                    store(builder, totals[per_row * i + j], row, constant(floats.count * j))

        with builder.if_else(builder.icmp_signed("==", span, constant(0))) as (one_group, more):
            with one_group:  # a loop of its own: its addresses are steps of one number, which is 2 % of a step
                add_groups(constant(0))
            with more:
                add_groups(span)

    return tile


_THIS = this_processor()
_PLAN = _PLANS[_THIS]
(MOST_ROWS, SOME_ROWS, _), WIDTH = _PLAN.rows, _PLAN.width
_INT4, _INT8, _ZEROS = WeightFormat.INT4, WeightFormat.INT8, WeightFormat.INT4_ZEROS
int4_most, int4_some, int4_one = (dot_tile(rows, WIDTH, _INT4, _THIS) for rows in _PLAN.rows)
int8_most, int8_some, int8_one = (dot_tile(rows, WIDTH, _INT8, _THIS) for rows in _PLAN.rows)
zeros_most, zeros_some, zeros_one = (dot_tile(rows, WIDTH, _ZEROS, _THIS) for rows in _PLAN.rows)
# Where fewer tiles than that are left.
int4_single, int8_single, zeros_single = (dot_tile(1, 1, each, _THIS) for each in (_INT4, _INT8, _ZEROS))

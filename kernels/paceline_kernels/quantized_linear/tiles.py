"""Dot products of int8 activations with packed weights, as LLVM instructions: sixteen outputs of a few rows at a time.

Knows the byte layout of a packed group (`packing` writes it) and nothing of matrices.

Inputs come in groups of 32. Lane c of a vector is an output; the inputs of a group are taken four at a time, because
the processor adds four byte products into each 32-bit lane. Inside a group everything is integer, hence exact in any
order. Over the groups each output adds, in ascending order, in float32 and with fused multiply-adds:

    total = total + (weight scale * integer sum) * row scale
    total = total + (weight scale * integer sum + weight minimum * row sum) * row scale     (formats with minima)

The row sum is that of the row's integers in the group.

That chain is the same for every tile size, so an output has the same bits alone and among any number of rows.

No saturation: the byte product of AVX2 adds two 16-bit products with saturation. Weights of 0 to 15 times activations
of -127 to 127 stay below 3,811 per pair, so that a whole group (8 pairs per lane, 30,480) fits into 16 bits. For int8
weights |w| ≤ 128 is multiplied with the activation under w's sign: at most 32,512. Where the processor is no AVX2 one
the same integers are computed by widening first.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from paceline_kernels.integers import BYTES, INTS, WORDS, Products, has_avx2
from paceline_kernels.llvm import (
    FLOAT,
    HALF,
    INT8,
    INT32,
    VECTOR,
    Ir,
    constant,
    fma,
    load,
    load_floats,
    loop,
    opaque,
    pointers,
    splat,
    store,
)

GROUP = 32
TILE = 16
INT4_GROUP_BYTES = GROUP * TILE // 2 + 2 * 2 * TILE
INT8_GROUP_BYTES = GROUP * TILE + 2 * TILE

_QUADS = GROUP // 4
_HALF_BYTES = 2

# What a format's group contributes: from its address and offset in bytes, and the rows' inputs, two int32 vectors per
# row: the sums of outputs 0 to 7 and 8 to 15.
_GroupSums = Callable[[Ir, bool, Ir, Ir, list[Ir], Ir], list[Ir]]


def _row_quads(builder: Ir, xs: list[Ir], offset: Ir) -> list[Ir]:
    """Four inputs of each row, repeated for every lane."""
    quads = [splat(builder, load(builder, x, offset, INT32), INTS) for x in xs]
    return [builder.bitcast(quad, BYTES) for quad in quads]


def _int4_sums(builder: Ir, avx2: bool, w: Ir, start: Ir, xs: list[Ir], x_start: Ir) -> list[Ir]:
    products = Products(builder, avx2=avx2)
    low_bits, shift = ir.Constant(BYTES, [15] * 32), ir.Constant(WORDS, [4] * 16)

    def add_quad(quad: Ir, sums: list[Ir]) -> list[Ir]:
        packed = load(builder, w, builder.add(start, builder.mul(quad, constant(32))), BYTES)
        high = builder.bitcast(builder.lshr(builder.bitcast(packed, WORDS), shift), BYTES)
        weights = [builder.and_(packed, low_bits), builder.and_(high, low_bits)]
        rows = _row_quads(builder, xs, builder.add(x_start, builder.mul(quad, constant(4))))
        added = [products.pairs(weight, row) for row in rows for weight in weights]
        return [builder.add(total, pairs) for total, pairs in zip(sums, added, strict=True)]

    zeros = [ir.Constant(WORDS, [0] * 16)] * (2 * len(xs))
    sums = _over_quads(builder, zeros, add_quad)
    return [products.neighbours(total) for total in sums]


def _int8_sums(builder: Ir, avx2: bool, w: Ir, start: Ir, xs: list[Ir], x_start: Ir) -> list[Ir]:
    products = Products(builder, avx2=avx2)
    zero = ir.Constant(BYTES, [0] * 32)

    def add_quad(quad: Ir, sums: list[Ir]) -> list[Ir]:
        first = builder.add(start, builder.mul(quad, constant(64)))
        weights = [load(builder, w, builder.add(first, constant(32 * half)), BYTES) for half in (0, 1)]
        magnitudes = [builder.select(builder.icmp_signed("<", v, zero), builder.neg(v), v) for v in weights]
        rows = _row_quads(builder, xs, builder.add(x_start, builder.mul(quad, constant(4))))
        pairs = list(zip(weights, magnitudes, strict=True))
        added = [products.signed_quads(weight, magnitude, row) for row in rows for weight, magnitude in pairs]
        return [builder.add(total, quads) for total, quads in zip(sums, added, strict=True)]

    return _over_quads(builder, [ir.Constant(INTS, [0] * 8)] * (2 * len(xs)), add_quad)


def _over_quads(builder: Ir, sums: list[Ir], add_quad: Callable[[Ir, list[Ir]], list[Ir]]) -> list[Ir]:
    """All quads of a group, two in each turn of a loop that the compiler leaves a loop."""

    def add_two(quad: Ir, totals: list[Ir]) -> list[Ir]:
        return add_quad(builder.add(quad, constant(1)), add_quad(quad, totals))

    return loop(builder, constant(0), opaque(builder, _QUADS), 2, sums, add_two)


def dot_tile(num_rows: int, group_sums: _GroupSums, group_bytes: int, *, avx2: bool) -> Any:  # noqa: ANN401
    """An operation out[i, :16] = x[i] · w for `num_rows` rows and one tile of sixteen outputs.

    Its arguments: x and its stride, the rows' scales and sums and their stride, w, the number of groups, out and its
    stride; addresses in bytes, strides in elements.
    """
    has_minima = group_sums is _int4_sums
    scales_at = group_bytes - _HALF_BYTES * TILE * (2 if has_minima else 1)

    def typed(_c: Ir, _x: Ir, _xs: Ir, _scales: Ir, _sums: Ir, _rs: Ir, _w: Ir, _n: Ir, _out: Ir, _os: Ir) -> Ir:
        def generate(context: Ir, builder: Ir, _signature: Ir, args: Ir) -> Ir:
            x, x_stride, scales, sums, row_stride, w, num_groups, out, out_stride = args
            xs = pointers(builder, x, x_stride, num_rows, INT8)
            row_scales, row_sums = (pointers(builder, start, row_stride, num_rows) for start in (scales, sums))
            weights = builder.inttoptr(w, INT8.as_pointer())
            halves = builder.inttoptr(w, HALF.as_pointer())

            def add_group(group: Ir, totals: list[Ir]) -> list[Ir]:
                start = builder.mul(group, constant(group_bytes))
                integers = group_sums(builder, avx2, weights, start, xs, builder.mul(group, constant(GROUP)))
                at = builder.udiv(builder.add(start, constant(scales_at)), constant(_HALF_BYTES))
                columns = [
                    load_floats(builder, halves, builder.add(at, constant(8 * i)), VECTOR)
                    for i in range(4 if has_minima else 2)
                ]
                following = []
                for i in range(num_rows):
                    scale = splat(builder, load(builder, row_scales[i], group, FLOAT), VECTOR)
                    row_sum = splat(builder, load(builder, row_sums[i], group, FLOAT), VECTOR)
                    for half in (0, 1):
                        exact = builder.sitofp(integers[2 * i + half], VECTOR)
                        if has_minima:
                            below = builder.fmul(columns[2 + half], row_sum)
                            product = fma(builder, columns[half], exact, below)
                        else:
                            product = builder.fmul(columns[half], exact)
                        following.append(fma(builder, product, scale, totals[2 * i + half]))
                return following

            zeros = [ir.Constant(VECTOR, [0.0] * 8)] * (2 * num_rows)
            totals = loop(builder, constant(0), num_groups, 1, zeros, add_group)
            for i, row in enumerate(pointers(builder, out, out_stride, num_rows)):
                store(builder, totals[2 * i], row, constant(0))
                store(builder, totals[2 * i + 1], row, constant(8))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), generate

    return intrinsic(typed)


_AVX2 = has_avx2()
int4_x1, int4_x2, int4_x4 = (dot_tile(rows, _int4_sums, INT4_GROUP_BYTES, avx2=_AVX2) for rows in (1, 2, 4))
int8_x1, int8_x2, int8_x4 = (dot_tile(rows, _int8_sums, INT8_GROUP_BYTES, avx2=_AVX2) for rows in (1, 2, 4))

"""Attention in integers, as LLVM instructions: products of query words with key bytes, of weights with value bytes.

Knows addresses, strides and how pairs of bytes lie (`int8` says where). It refuses to know blocks, heads and segments.

A product takes its inputs two at a time: the processor multiplies two 16-bit words with two others and adds them into
each 32-bit lane. Bytes lie so that a lane is an output and its two inputs are neighbours: nothing is ever summed across
lanes, and as long as no sum leaves 32 bits, which is the caller's to see to, the integers are exact in any order.

Addresses are in bytes, strides and lengths in elements.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from paceline_kernels.integers import INTS, WORDS, Products, has_avx2
from paceline_kernels.llvm import (
    FLOAT,
    INT8,
    INT16,
    INT32,
    INT64,
    LANES,
    VECTOR,
    Ir,
    combine_lanes,
    constant,
    fma,
    load,
    loop,
    pointers,
    splat,
    store,
)

# Columns of a tile: two vectors of outputs.
TILE = 2 * LANES
_HALVES = (0, LANES)
_PAIRS = ir.VectorType(INT8, 2 * LANES)

# e to the r for |r| <= ln 2 / 2 within 8e-8: coefficients of r to the 5th and 4th, 3rd and 2nd, 1st and 0th.
_EXP = (
    (0.00829761940985918, 0.04191562905907631),
    (0.16667576134204865, 0.4999889135360718),
    (0.9999997019767761, 1.0),
)
_LOG2_E, _LN2 = 1.44269504, 0.69314718
# Added to a small number, it leaves the nearest integer in the lowest bits of the sum.
_INTEGER = 1.5 * 2**23
# The same, and 127: an exponent.
_EXPONENT = _INTEGER + 127
_SMALLEST = -87.33654  # below this e to the x counts as 0


def _floats(value: float) -> Ir:
    return ir.Constant(VECTOR, [float(np.float32(value))] * LANES)


def _emit_products(
    builder: Ir, rows: list[Ir], num_pairs: Ir, columns: Ir, stride: Ir, sums: list[Ir], avx2: bool
) -> list[Ir]:
    """Add rows · columns to `sums`, two vectors for each row; pairs of columns lie `stride` bytes apart."""
    products = Products(builder, avx2=avx2)

    def add_pair(index: Ir, totals: list[Ir]) -> list[Ir]:
        first = builder.mul(index, stride)
        bytes_ = [load(builder, columns, builder.add(first, constant(2 * half)), _PAIRS) for half in _HALVES]
        words = [builder.sext(pair, WORDS) for pair in bytes_]
        following = []
        for i, row in enumerate(rows):
            pair = load(builder, row, builder.mul(index, constant(2)), INT32)
            repeated = builder.bitcast(splat(builder, pair, INTS), WORDS)
            for j, column in enumerate(words):
                following.append(builder.add(totals[2 * i + j], products.word_pairs(repeated, column)))
        return following

    return loop(builder, constant(0), num_pairs, 1, sums, add_pair)


def score_tile(num_rows: int, *, avx2: bool) -> Any:  # noqa: ANN401
    """An operation out[i, :16] = (x[i] · keys of 16 slots) * scale of the row * scales of the slots, float32.

    Its arguments: x, int16, and its stride; the number of pairs of dimensions; the keys' pairs and their stride; the
    scales of the rows, those of the slots; out and its stride.
    """

    def typed(_c: Ir, _x: Ir, _xs: Ir, _n: Ir, _k: Ir, _ks: Ir, _rows: Ir, _slots: Ir, _out: Ir, _os: Ir) -> Ir:
        def generate(context: Ir, builder: Ir, _signature: Ir, args: Ir) -> Ir:
            x, x_stride, num_pairs, keys, stride, row_scales, slot_scales, out, out_stride = args
            rows = pointers(builder, x, x_stride, num_rows, INT16)
            zeros = [ir.Constant(INTS, [0] * LANES)] * (2 * num_rows)
            pairs = builder.inttoptr(keys, INT8.as_pointer())
            sums = _emit_products(builder, rows, num_pairs, pairs, stride, zeros, avx2)
            of_rows, of_slots = (builder.inttoptr(at, FLOAT.as_pointer()) for at in (row_scales, slot_scales))
            columns = [load(builder, of_slots, constant(half), VECTOR) for half in _HALVES]
            for i, target in enumerate(pointers(builder, out, out_stride, num_rows)):
                scale = splat(builder, load(builder, of_rows, constant(i), FLOAT), VECTOR)
                for j, half in enumerate(_HALVES):
                    exact = builder.sitofp(sums[2 * i + j], VECTOR)
                    store(builder, builder.fmul(builder.fmul(exact, scale), columns[j]), target, constant(half))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), generate

    return intrinsic(typed)


def value_tile(num_rows: int, *, avx2: bool) -> Any:  # noqa: ANN401
    """An operation out[i, :16] = (weights[i] · 16 dimensions of the slots of some blocks) * scale of the row, float32.

    Its arguments: the weights, int16, and their stride; the blocks' ids, how many there are, where block 0 has the
    pairs, the bytes from block to block; the number of pairs in a block, and their stride; the scales of the rows; out
    and its stride.
    """

    def typed(
        _c: Ir, _w: Ir, _ws: Ir, _t: Ir, _nb: Ir, _v: Ir, _bb: Ir, _n: Ir, _vs: Ir, _s: Ir, _o: Ir, _os: Ir
    ) -> Ir:
        def generate(context: Ir, builder: Ir, _signature: Ir, args: Ir) -> Ir:
            weights, weight_stride, table, num_blocks, values, block_bytes = args[:6]
            num_pairs, stride, scales, out, out_stride = args[6:]
            rows = pointers(builder, weights, weight_stride, num_rows, INT16)
            ids, block_0 = builder.inttoptr(table, INT32.as_pointer()), builder.inttoptr(values, INT8.as_pointer())

            def add_block(index: Ir, sums: list[Ir]) -> list[Ir]:
                block = builder.sext(load(builder, ids, index, INT32), INT64)
                pairs = builder.gep(block_0, [builder.mul(block, block_bytes)])
                first = builder.mul(index, builder.mul(num_pairs, constant(2)))
                here = [builder.gep(row, [first]) for row in rows]
                return _emit_products(builder, here, num_pairs, pairs, stride, sums, avx2)

            zeros = [ir.Constant(INTS, [0] * LANES)] * (2 * num_rows)
            sums = loop(builder, constant(0), num_blocks, 1, zeros, add_block)
            of_rows = builder.inttoptr(scales, FLOAT.as_pointer())
            for i, target in enumerate(pointers(builder, out, out_stride, num_rows)):
                scale = splat(builder, load(builder, of_rows, constant(i), FLOAT), VECTOR)
                for j, half in enumerate(_HALVES):
                    store(builder, builder.fmul(builder.sitofp(sums[2 * i + j], VECTOR), scale), target, constant(half))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 11), generate

    return intrinsic(typed)


def _exponential(builder: Ir, x: Ir) -> Ir:
    """e to the x for x of the smallest to 0, and NaN; anything below, which the caller makes 0."""
    shifted = fma(builder, x, _floats(_LOG2_E), _floats(_EXPONENT))
    exponent = builder.fsub(shifted, _floats(_EXPONENT))
    r = fma(builder, exponent, _floats(-_LN2), x)
    square = builder.fmul(r, r)
    high, middle, low = (fma(builder, r, _floats(odd), _floats(even)) for odd, even in _EXP)
    p = fma(builder, square, fma(builder, square, high, middle), low)
    power = builder.shl(builder.bitcast(shifted, INTS), ir.Constant(INTS, [23] * LANES))
    return builder.fmul(p, builder.bitcast(power, VECTOR))


def _typed_weigh(_context: Ir, _scores: Ir, _count: Ir, _largest: Ir, _scales: Ir) -> Ir:
    """Make scores weights, in place: e to the (score - largest) times the slot's scale, 0 where that is below 1e-38.

    `count` is a multiple of 8. Returns the sum of the exponentials and the largest weight, NaN if one is NaN.
    Lane l of 8 adds elements l, l + 8, l + 16, …, then the lanes are halved until one is left.
    """

    def generate(_: Ir, builder: Ir, _signature: Ir, args: Ir) -> Ir:
        scores, count, largest, scales = args
        row, of_slots = (builder.inttoptr(at, FLOAT.as_pointer()) for at in (scores, scales))
        most, none = splat(builder, largest, VECTOR), ir.Constant(INTS, [0] * LANES)

        def larger(a: Ir, b: Ir) -> Ir:
            return builder.select(builder.icmp_signed(">", a, b), a, b)

        def step(index: Ir, carried: list[Ir]) -> list[Ir]:
            below = builder.fsub(load(builder, row, index, VECTOR), most)
            counts = builder.fcmp_unordered(">=", below, _floats(_SMALLEST))
            exponential = _exponential(builder, below)
            weight = builder.fmul(exponential, load(builder, of_slots, index, VECTOR))
            kept = [builder.select(counts, builder.bitcast(value, INTS), none) for value in (exponential, weight)]
            store(builder, kept[1], row, index)
            # Weights are not negative, so they order as integers do; a NaN, whatever its sign, has to be the largest.
            magnitude = builder.and_(kept[1], ir.Constant(INTS, [0x7FFFFFFF] * LANES))
            return [builder.fadd(carried[0], builder.bitcast(kept[0], VECTOR)), larger(magnitude, carried[1])]

        sums, best = loop(builder, constant(0), count, LANES, [_floats(0.0), none], step)
        total = combine_lanes(builder, sums, builder.fadd)
        highest = builder.bitcast(combine_lanes(builder, best, larger), FLOAT)
        return cgutils.pack_array(builder, [total, highest])

    return types.UniTuple(types.float32, 2)(types.int64, types.int64, types.float32, types.int64), generate


def _typed_round(_context: Ir, _x: Ir, _count: Ir, _factor: Ir, _out: Ir) -> Ir:
    """out[i] = x[i] * factor, rounded to even, as int16, anything for NaN. `count` is a multiple of 8."""

    def generate(context: Ir, builder: Ir, _signature: Ir, args: Ir) -> Ir:
        x, count, factor, out = args
        row, target = builder.inttoptr(x, FLOAT.as_pointer()), builder.inttoptr(out, INT16.as_pointer())
        factors = splat(builder, factor, VECTOR)

        def step(index: Ir, carried: list[Ir]) -> list[Ir]:
            # The sum's lowest bits are the integer.
            shifted = fma(builder, load(builder, row, index, VECTOR), factors, _floats(_INTEGER))
            store(builder, builder.trunc(builder.bitcast(shifted, INTS), ir.VectorType(INT16, LANES)), target, index)
            return carried

        loop(builder, constant(0), count, LANES, [], step)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64), generate


def _typed_copy(_context: Ir, _x: Ir, _count: Ir, _out: Ir) -> Ir:
    """out[i] = x[i] for `count` floats, a multiple of 8."""

    def generate(context: Ir, builder: Ir, _signature: Ir, args: Ir) -> Ir:
        x, count, out = args
        row, target = builder.inttoptr(x, FLOAT.as_pointer()), builder.inttoptr(out, FLOAT.as_pointer())

        def step(index: Ir, carried: list[Ir]) -> list[Ir]:
            store(builder, load(builder, row, index, VECTOR), target, index)
            return carried

        loop(builder, constant(0), count, LANES, [], step)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


copy: Any = intrinsic(_typed_copy)
round_to_words: Any = intrinsic(_typed_round)
weigh: Any = intrinsic(_typed_weigh)
_AVX2 = has_avx2()
score_x1, score_x2, score_x3, score_x6 = (score_tile(rows, avx2=_AVX2) for rows in (1, 2, 3, 6))
value_x1, value_x2, value_x3, value_x6 = (value_tile(rows, avx2=_AVX2) for rows in (1, 2, 3, 6))

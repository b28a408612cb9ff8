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

from paceline_kernels.compiler.llvm import (
    FLOAT,
    INT8,
    INT16,
    INT32,
    INT64,
    LANES,
    Ir,
    combine_lanes,
    constant,
    fma,
    load,
    loop,
    operation,
    pointers,
    splat,
    store,
)
from paceline_kernels.vector.integers import Processor, Products, this_processor

# What blocks' slots and heads' dimensions are multiples of: the largest vector of outputs.
STEP = 16

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


def _floats(value: float, lanes: int) -> Ir:
    return ir.Constant(ir.VectorType(FLOAT, lanes), [float(np.float32(value))] * lanes)


def _emit_products(
    products: Products, builder: Ir, rows: list[Ir], num_pairs: Ir, columns: list[Ir], stride: Ir, sums: list[Ir]
) -> list[Ir]:
    """Add rows · columns to `sums`, a vector for each row and column; pairs of a column lie `stride` bytes apart."""
    pairs_of_bytes = ir.VectorType(INT8, 2 * products.lanes)

    def add_pair(index: Ir, totals: list[Ir]) -> list[Ir]:
        first = builder.mul(index, stride)
        words = [builder.sext(load(builder, column, first, pairs_of_bytes), products.words) for column in columns]
        following = []
        for i, row in enumerate(rows):
            pair = load(builder, row, builder.mul(index, constant(2)), INT32)
            repeated = builder.bitcast(splat(builder, pair, products.ints), products.words)
            for j, column in enumerate(words):
                following.append(products.add_word_pairs(totals[len(words) * i + j], repeated, column))
        return following

    return loop(builder, constant(0), num_pairs, 1, sums, add_pair)


def score_tile(num_rows: int, processor: Processor) -> Any:  # noqa: ANN401
    """An operation out[i] = (x[i] · keys of some slots) * scale of the row * scales of the slots, float32.

    For two vectors of as many slots as the processor has lanes. Its arguments: x, int16, and its stride; the number of
    pairs of dimensions and the stride of the keys' pairs; the scales of the rows; out's stride; then of each vector the
    keys' pairs, the scales of the slots, and out.
    """

    @operation(types.void, *[types.int64] * 12)
    def tile(
        builder: Ir,
        x: Ir,
        x_stride: Ir,
        num_pairs: Ir,
        stride: Ir,
        row_scales: Ir,
        out_stride: Ir,
        *vectors: Ir,
    ) -> None:
        products = Products(builder, processor)
        rows = pointers(builder, x, x_stride, num_rows, INT16)
        columns = [builder.inttoptr(keys, INT8.as_pointer()) for keys in vectors[::3]]
        sums = _emit_products(products, builder, rows, num_pairs, columns, stride, [products.zeros] * (2 * num_rows))
        of_rows = builder.inttoptr(row_scales, FLOAT.as_pointer())
        for j, (slots, out) in enumerate(zip(vectors[1::3], vectors[2::3], strict=True)):
            of_slots = load(builder, builder.inttoptr(slots, FLOAT.as_pointer()), constant(0), products.floats)
            for i, target in enumerate(pointers(builder, out, out_stride, num_rows)):
                scale = splat(builder, load(builder, of_rows, constant(i), FLOAT), products.floats)
                exact = builder.sitofp(sums[2 * i + j], products.floats)
                store(builder, builder.fmul(builder.fmul(exact, scale), of_slots), target, constant(0))

    return tile


def value_tile(num_rows: int, processor: Processor) -> Any:  # noqa: ANN401
    """An operation out[i] = (weights[i] · some dimensions of the slots of some blocks) * scale of the row, float32.

    For two vectors of as many dimensions as the processor has lanes. Its arguments: the weights, int16, and their
    stride; the blocks' ids, how many there are, where block 0 has the pairs, the bytes from block to block; the number
    of pairs in a block, and their stride; the scales of the rows; out and its stride; how many dimensions the second
    vector lies behind the first.
    """

    @operation(types.void, *[types.int64] * 12)
    def tile(
        builder: Ir,
        weights: Ir,
        weight_stride: Ir,
        table: Ir,
        num_blocks: Ir,
        values: Ir,
        block_bytes: Ir,
        num_pairs: Ir,
        stride: Ir,
        scales: Ir,
        out: Ir,
        out_stride: Ir,
        apart: Ir,
    ) -> None:
        products = Products(builder, processor)
        rows = pointers(builder, weights, weight_stride, num_rows, INT16)
        ids, starts = builder.inttoptr(table, INT32.as_pointer()), (constant(0), apart)
        block_0 = builder.inttoptr(values, INT8.as_pointer())
        columns = [builder.gep(block_0, [builder.mul(start, constant(2))]) for start in starts]

        def add_block(index: Ir, sums: list[Ir]) -> list[Ir]:
            block = builder.mul(builder.sext(load(builder, ids, index, INT32), INT64), block_bytes)
            pairs = [builder.gep(column, [block]) for column in columns]
            first = builder.mul(index, builder.mul(num_pairs, constant(2)))
            here = [builder.gep(row, [first]) for row in rows]
            return _emit_products(products, builder, here, num_pairs, pairs, stride, sums)

        sums = loop(builder, constant(0), num_blocks, 1, [products.zeros] * (2 * num_rows), add_block)
        of_rows = builder.inttoptr(scales, FLOAT.as_pointer())
        for i, target in enumerate(pointers(builder, out, out_stride, num_rows)):
            scale = splat(builder, load(builder, of_rows, constant(i), FLOAT), products.floats)
            for j, start in enumerate(starts):
                exact = builder.sitofp(sums[2 * i + j], products.floats)
                store(builder, builder.fmul(exact, scale), target, start)

    return tile


def _exponential(builder: Ir, x: Ir) -> Ir:
    """e to the x for x of the smallest to 0, and NaN; anything below, which the caller makes 0."""
    lanes = x.type.count
    ints = ir.VectorType(INT32, lanes)
    shifted = fma(builder, x, _floats(_LOG2_E, lanes), _floats(_EXPONENT, lanes))
    exponent = builder.fsub(shifted, _floats(_EXPONENT, lanes))
    r = fma(builder, exponent, _floats(-_LN2, lanes), x)
    square = builder.fmul(r, r)
    high, middle, low = (fma(builder, r, _floats(odd, lanes), _floats(even, lanes)) for odd, even in _EXP)
    p = fma(builder, square, fma(builder, square, high, middle), low)
    power = builder.shl(builder.bitcast(shifted, ints), ir.Constant(ints, [23] * lanes))
    return builder.fmul(p, builder.bitcast(power, x.type))


def _eights(builder: Ir, vector: Ir) -> list[Ir]:
    """The vector as vectors of 8 lanes, in order."""
    undefined = ir.Constant(vector.type, ir.Undefined)
    lanes = [range(start, start + LANES) for start in range(0, vector.type.count, LANES)]
    masks = [ir.Constant(ir.VectorType(INT32, LANES), [*eight]) for eight in lanes]
    return [builder.shuffle_vector(vector, undefined, mask) for mask in masks]


def weigh_by(processor: Processor) -> Any:  # noqa: ANN401
    """An operation that makes scores weights, in place, and returns the sum of exponentials and the largest weight.

    Its arguments: the scores, their number, a multiple of 16, the largest of them, and their slots' scales. A weight is
    e to the (score - largest) times the slot's scale, 0 where that is below 1e-38. What it returns is NaN if one is
    NaN. Lane l of 8 adds elements l, l + 8, l + 16, …, then the lanes are halved until one is left.
    """
    lanes = processor.lanes
    floats, ints = ir.VectorType(FLOAT, lanes), ir.VectorType(INT32, lanes)

    @operation(types.UniTuple(types.float32, 2), types.int64, types.int64, types.float32, types.int64)
    def weigh(builder: Ir, scores: Ir, count: Ir, largest: Ir, scales: Ir) -> Ir:
        row, of_slots = (builder.inttoptr(at, FLOAT.as_pointer()) for at in (scores, scales))
        most, none = splat(builder, largest, floats), ir.Constant(ints, [0] * lanes)

        def larger(a: Ir, b: Ir) -> Ir:
            return builder.select(builder.icmp_signed(">", a, b), a, b)

        def step(index: Ir, carried: list[Ir]) -> list[Ir]:
            total, best = carried
            below = builder.fsub(load(builder, row, index, floats), most)
            counts = builder.fcmp_unordered(">=", below, _floats(_SMALLEST, lanes))
            exponential = _exponential(builder, below)
            weight = builder.fmul(exponential, load(builder, of_slots, index, floats))
            kept = [builder.select(counts, builder.bitcast(value, ints), none) for value in (exponential, weight)]
            store(builder, kept[1], row, index)
            for eight in _eights(builder, builder.bitcast(kept[0], floats)):
                total = builder.fadd(total, eight)
            # Weights are not negative, so they order as integers do; a NaN of either sign has to be the largest.
            magnitude = builder.and_(kept[1], ir.Constant(ints, [0x7FFFFFFF] * lanes))
            return [total, larger(magnitude, best)]

        sums, best = loop(builder, constant(0), count, lanes, [_floats(0.0, LANES), none], step)
        total = combine_lanes(builder, sums, builder.fadd)
        highest = builder.bitcast(combine_lanes(builder, best, larger), FLOAT)
        return cgutils.pack_array(builder, [total, highest])

    return weigh


def round_to_words_by(processor: Processor) -> Any:  # noqa: ANN401
    """An operation out[i] = x[i] * factor, rounded to even, as int16, anything for NaN.

    Its arguments: x, its length, a multiple of 16, the factor, and out.
    """
    lanes = processor.lanes
    floats, words = ir.VectorType(FLOAT, lanes), ir.VectorType(INT16, lanes)

    @operation(types.void, types.int64, types.int64, types.float32, types.int64)
    def round_to_words(builder: Ir, x: Ir, count: Ir, factor: Ir, out: Ir) -> None:
        row, target = builder.inttoptr(x, FLOAT.as_pointer()), builder.inttoptr(out, INT16.as_pointer())
        factors = splat(builder, factor, floats)

        def step(index: Ir, carried: list[Ir]) -> list[Ir]:
            # The sum's lowest bits are the integer.
            shifted = fma(builder, load(builder, row, index, floats), factors, _floats(_INTEGER, lanes))
            integers = builder.bitcast(shifted, ir.VectorType(INT32, lanes))
            store(builder, builder.trunc(integers, words), target, index)
            return carried

        loop(builder, constant(0), count, lanes, [], step)

    return round_to_words


@operation(types.void, types.int64, types.int64, types.int64)
def copy(builder: Ir, x: Ir, count: Ir, out: Ir) -> None:
    """out[i] = x[i] for `count` floats, a multiple of 8."""
    row, target = builder.inttoptr(x, FLOAT.as_pointer()), builder.inttoptr(out, FLOAT.as_pointer())

    def step(index: Ir, carried: list[Ir]) -> list[Ir]:
        store(builder, load(builder, row, index, ir.VectorType(FLOAT, LANES)), target, index)
        return carried

    loop(builder, constant(0), count, LANES, [], step)


_THIS = this_processor()
WIDTH = _THIS.lanes
round_to_words, weigh = round_to_words_by(_THIS), weigh_by(_THIS)
# Six rows by two vectors fill the registers of AVX2, and keep both multipliers of VNNI busy.
score_x6, score_x3, score_x2, score_x1 = (score_tile(rows, _THIS) for rows in (6, 3, 2, 1))
value_x6, value_x3, value_x2, value_x1 = (value_tile(rows, _THIS) for rows in (6, 3, 2, 1))

"""Vector building blocks of the CPU kernels: sums in one fixed order, written as LLVM instructions.

Knows addresses, strides and float32; one operand may be stored as float16 or int8, and each of its elements is made a
float32 when it is loaded. It refuses to know matrices, heads and blocks.

Why not leave it to the compiler: a float sum is fast only when reordered, and a compiler reorders each loop in its own
way, so that one row of a tile of four would differ in its last bits from the same row alone. Here every tile size runs
the same chain of fused multiply-adds per output element; rows and columns of a tile share loads, never arithmetic.

Order of a dot product: lane l of 8 adds the products of elements l, l + 8, l + 16, … one after the other; the lanes are
added as ((0+1)+(2+3))+((4+5)+(6+7)); the elements after the last full 8 follow one by one.
Order of a dot product in slices: each slice so, then neighbouring slices' sums are added, then neighbours among those,
until there is one; a sum without a neighbour waits for the next round.
Order of a weighted sum: each output element adds its products one by one, in ascending order of the rows summed over.

Addresses are in bytes, as int64; strides and lengths are in elements. Bounds are the caller's to keep. `like` is any
array of the type in which the operand `w` or `v` is stored: float32, int8, or uint16 for the bits of a float16.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from paceline_kernels.compiler.jit import compiled
from paceline_kernels.compiler.llvm import (
    FLOAT,
    HALF,
    INT8,
    INT32,
    LANES,
    VECTOR,
    Ir,
    combine_lanes,
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
from paceline_kernels.compiler.llvm import FLOAT_BYTES as FLOAT_BYTES
from paceline_kernels.vector import MAX_SLICES

# An array that says how the elements of an operand are stored.
Stored = npt.NDArray[Any]
_CACHE_LINE_BYTES = 64
# How the elements of an array are stored, by numba's type of them.
_STORED = {types.float32: FLOAT, types.uint16: HALF, types.int8: INT8}


def _pair_sums(builder: Ir, a: Ir, b: Ir) -> Ir:
    """The sums of neighbouring lanes: of a's low half, b's low half, a's high half, b's high half."""
    evens, odds = (
        [first, first + 2, first + 8, first + 10, first + 4, first + 6, first + 12, first + 14] for first in (0, 1)
    )
    masks = [ir.Constant(ir.VectorType(INT32, LANES), lanes) for lanes in (evens, odds)]
    return builder.fadd(*(builder.shuffle_vector(a, b, mask) for mask in masks))


def _lane_sums(builder: Ir, vectors: list[Ir]) -> Ir:
    """The sum of the lanes of one vector, as a float, or of four, as a vector of four; see the module for the order."""
    a, b, c, d = vectors if len(vectors) == 4 else vectors * 4
    quarters = _pair_sums(builder, _pair_sums(builder, a, b), _pair_sums(builder, c, d))
    undefined = ir.Constant(VECTOR, ir.Undefined)
    masks = [ir.Constant(ir.VectorType(INT32, 4), [first + i for i in range(4)]) for first in (0, 4)]
    sums = builder.fadd(*(builder.shuffle_vector(quarters, undefined, mask) for mask in masks))
    return sums if len(vectors) == 4 else builder.extract_element(sums, INT32(0))


def _together(builder: Ir, values: list[Ir]) -> Ir:
    """One float as it is, several as a vector."""
    if len(values) == 1:
        return values[0]
    vector = ir.Constant(ir.VectorType(FLOAT, len(values)), ir.Undefined)
    for i, value in enumerate(values):
        vector = builder.insert_element(vector, value, INT32(i))
    return vector


def _emit_dots(builder: Ir, xs: list[Ir], ws: list[Ir], length: Ir) -> list[Ir]:
    """Per row of `xs`, its dot products with the one row, or the four rows, in `ws`; in the order the module names."""

    def add_lanes(index: Ir, sums: list[Ir]) -> list[Ir]:
        rows = [load(builder, x, index, VECTOR) for x in xs]
        following: list[list[Ir]] = [[] for _ in xs]
        for j, w in enumerate(ws):
            column = load_floats(builder, w, index, VECTOR)
            for i, row in enumerate(rows):
                following[i].append(fma(builder, row, column, sums[i * len(ws) + j]))
        return [total for row in following for total in row]

    def add_rest(index: Ir, sums: list[Ir]) -> list[Ir]:
        columns = _together(builder, [load_floats(builder, w, index, FLOAT) for w in ws])
        rows = [splat(builder, load(builder, x, index, FLOAT), columns.type) for x in xs]
        return [fma(builder, row, columns, total) for row, total in zip(rows, sums, strict=True)]

    full = builder.and_(length, constant(-LANES))
    zeros = [ir.Constant(VECTOR, [0.0] * LANES)] * (len(xs) * len(ws))
    lanes = loop(builder, constant(0), full, LANES, zeros, add_lanes)
    totals = [_lane_sums(builder, lanes[i * len(ws) : (i + 1) * len(ws)]) for i in range(len(xs))]
    return loop(builder, full, length, 1, totals, add_rest)


def _emit_sliced_dots(builder: Ir, xs: list[Ir], ws: list[Ir], length: Ir, slices: Ir) -> list[Ir]:
    """The same for rows of `slices` times `length` elements, in slices."""
    kind = FLOAT if len(ws) == 1 else ir.VectorType(FLOAT, len(ws))
    sums = [cgutils.alloca_once(builder, kind, MAX_SLICES) for _ in xs]

    def add_slice(index: Ir, carried: list[Ir]) -> list[Ir]:
        start = [builder.mul(index, length)]
        rows, columns = ([builder.gep(each, start) for each in side] for side in (xs, ws))
        _store_each(builder, _emit_dots(builder, rows, columns, length), sums, index)
        return carried

    def add_neighbours(distance: Ir) -> Callable[[Ir, list[Ir]], list[Ir]]:
        def add(index: Ir, carried: list[Ir]) -> list[Ir]:
            ones, others = (
                [load(builder, each, at, kind) for each in sums] for at in (index, builder.add(index, distance))
            )
            _store_each(builder, [builder.fadd(*pair) for pair in zip(ones, others, strict=True)], sums, index)
            return carried

        return add

    loop(builder, constant(0), slices, 1, [], add_slice)
    for distance in (1, 2, 4):
        last = builder.sub(slices, constant(distance))
        loop(builder, constant(0), last, 2 * distance, [], add_neighbours(constant(distance)))
    return [load(builder, each, constant(0), kind) for each in sums]


def _store_each(builder: Ir, values: list[Ir], targets: list[Ir], index: Ir) -> None:
    for value, target in zip(values, targets, strict=True):
        store(builder, value, target, index)


def _dot_tile(num_rows: int, num_columns: int) -> Any:  # noqa: ANN401
    """An operation out[i, j] = x[i] · w[j] for a tile of `num_rows` by `num_columns`, which are one or four.

    Without slices (None) it has no code for them, which costs where a tile is one short loop.
    """

    def typed(_context: Ir, _a: Ir, _sa: Ir, _b: Ir, _sb: Ir, _n: Ir, slices: Ir, _out: Ir, _so: Ir, like: Ir) -> Ir:
        is_whole = isinstance(slices, types.NoneType)
        signature = types.void(*[types.int64] * 5, slices if is_whole else types.int64, *[types.int64] * 2, like)

        def generate(context: Ir, builder: Ir, _signature: Ir, args: Ir) -> Ir:
            x, x_stride, w, w_stride, length, count, out, out_stride, _ = args
            xs = pointers(builder, x, x_stride, num_rows)
            ws = pointers(builder, w, w_stride, num_columns, _STORED[like.dtype])
            outs = pointers(builder, out, out_stride, num_rows)
            totals = (
                _emit_dots(builder, xs, ws, length) if is_whole else _emit_sliced_dots(builder, xs, ws, length, count)
            )
            _store_each(builder, totals, outs, constant(0))
            return context.get_dummy_value()

        return signature, generate

    return intrinsic(typed)


def _weighted_sum_tile(num_rows: int, num_vectors: int, lanes: int) -> Any:  # noqa: ANN401
    """An operation out[i, c] += sum over s of p[i, s] * v[s, c], for rows of `num_vectors * lanes` columns."""
    kind = VECTOR if lanes == LANES else FLOAT

    def typed(_context: Ir, _a: Ir, _sa: Ir, _b: Ir, _sb: Ir, _n: Ir, _out: Ir, _so: Ir, like: Ir) -> Ir:
        signature = types.void(*[types.int64] * 7, like)

        def generate(context: Ir, builder: Ir, _signature: Ir, args: Ir) -> Ir:
            p, p_stride, v, v_stride, count, out, out_stride, _ = args
            ps = pointers(builder, p, p_stride, num_rows)
            outs = pointers(builder, out, out_stride, num_rows)
            columns = [constant(j * lanes) for j in range(num_vectors)]
            values = builder.inttoptr(v, _STORED[like.dtype].as_pointer())

            def add(index: Ir, sums: list[Ir]) -> list[Ir]:
                base = builder.mul(index, v_stride)
                weights = [splat(builder, load(builder, weight, index, FLOAT), kind) for weight in ps]
                following: list[list[Ir]] = [[] for _ in ps]
                for j, column in enumerate(columns):
                    value = load_floats(builder, values, builder.add(base, column), kind)
                    for i, weight in enumerate(weights):
                        following[i].append(fma(builder, weight, value, sums[i * num_vectors + j]))
                return [total for row in following for total in row]

            carried = [load(builder, row, column, kind) for row in outs for column in columns]
            totals = iter(loop(builder, constant(0), count, 1, carried, add))
            for row in outs:
                for column in columns:
                    store(builder, next(totals), row, column)
            return context.get_dummy_value()

        return signature, generate

    return intrinsic(typed)


@operation(types.float32, types.int64, types.int64, types.int64)
def dot(builder: Ir, x: Ir, w: Ir, length: Ir) -> Ir:
    """The dot product of two rows at these addresses, as float32."""
    one = constant(0)
    return _emit_dots(builder, pointers(builder, x, one, 1), pointers(builder, w, one, 1), length)[0]


@operation(types.float32, types.int64, types.int64)
def maximum(builder: Ir, x: Ir, length: Ir) -> Ir:
    """The largest of `length` floats at this address, -inf when there is none; NaNs are passed over."""
    row = builder.inttoptr(x, FLOAT.as_pointer())

    def larger(a: Ir, b: Ir) -> Ir:
        return builder.select(builder.fcmp_ordered(">", a, b), a, b)

    def step(kind: Ir) -> Callable[[Ir, list[Ir]], list[Ir]]:
        return lambda index, best: [larger(load(builder, row, index, kind), best[0])]

    full = builder.and_(length, constant(-LANES))
    lowest = ir.Constant(VECTOR, [float("-inf")] * LANES)
    lanes = loop(builder, constant(0), full, LANES, [lowest], step(VECTOR))
    best = combine_lanes(builder, lanes[0], larger)
    return loop(builder, full, length, 1, [best], step(FLOAT))[0]


@operation(types.void, types.int64, types.float32, types.int64, types.float32, types.int64)
def blend(builder: Ir, x: Ir, share: Ir, out: Ir, out_share: Ir, length: Ir) -> None:
    """out = out * out_share + x * share, for `length` floats at these addresses."""
    row, target = (builder.inttoptr(address, FLOAT.as_pointer()) for address in (x, out))

    def step(kind: Ir) -> Callable[[Ir, list[Ir]], list[Ir]]:
        shares = [splat(builder, factor, kind) for factor in (share, out_share)]

        def blend(index: Ir, carried: list[Ir]) -> list[Ir]:
            kept = builder.fmul(load(builder, target, index, kind), shares[1])
            store(builder, fma(builder, load(builder, row, index, kind), shares[0], kept), target, index)
            return carried

        return blend

    full = builder.and_(length, constant(-LANES))
    loop(builder, constant(0), full, LANES, [], step(VECTOR))
    loop(builder, full, length, 1, [], step(FLOAT))


@operation(types.float32, types.int64)
def half(builder: Ir, address: Ir) -> Ir:
    """The float16 at this address, as float32."""
    return load_floats(builder, builder.inttoptr(address, HALF.as_pointer()), constant(0), FLOAT)


@operation(types.void, types.int64, types.int64)
def prefetch(builder: Ir, address: Ir, num_bytes: Ir) -> None:
    """Ask for this much memory, soon to be read. Any address will do: nothing is read through it now."""
    pointer = builder.inttoptr(address, INT8.as_pointer())

    def step(index: Ir, carried: list[Ir]) -> list[Ir]:
        prefetch_line(builder, pointer, index)
        return carried

    loop(builder, constant(0), num_bytes, _CACHE_LINE_BYTES, [], step)


@operation(types.void, types.int64, types.int64, types.int64)
def narrow(builder: Ir, x: Ir, count: Ir, out: Ir) -> None:
    """Write `count` floats, a multiple of 8, as float16, rounded to even."""
    row, target = builder.inttoptr(x, FLOAT.as_pointer()), builder.inttoptr(out, HALF.as_pointer())

    def step(index: Ir, carried: list[Ir]) -> list[Ir]:
        halves = builder.fptrunc(load(builder, row, index, VECTOR), ir.VectorType(HALF, LANES))
        store(builder, halves, target, index)
        return carried

    loop(builder, constant(0), count, LANES, [], step)


@operation(types.void, types.int64, types.int64, types.float32)
def put(builder: Ir, address: Ir, index: Ir, value: Ir) -> None:
    """Write a float32 as the element `index` of what lies at the address."""
    store(builder, value, builder.inttoptr(address, FLOAT.as_pointer()), index)


# Three rows by four columns fill the sixteen vector registers of AVX2: twelve sums, three rows, one column.
_dot_3x4, _dot_2x4, _dot_1x4 = (_dot_tile(rows, 4) for rows in (3, 2, 1))
_dot_3x1, _dot_2x1, _dot_1x1 = (_dot_tile(rows, 1) for rows in (3, 2, 1))
_sum_3x32, _sum_2x32, _sum_1x32 = (_weighted_sum_tile(rows, 4, LANES) for rows in (3, 2, 1))
_sum_3x8, _sum_2x8, _sum_1x8 = (_weighted_sum_tile(rows, 1, LANES) for rows in (3, 2, 1))
_sum_3x1, _sum_2x1, _sum_1x1 = (_weighted_sum_tile(rows, 1, 1) for rows in (3, 2, 1))


@compiled
def address(array: npt.NDArray[Any]) -> int:
    """Where the array's first element lies, in bytes."""
    return np.int64(array.ctypes.data)  # type: ignore[return-value]


@compiled
def _dot_columns(
    x: int,
    x_stride: int,
    num_rows: int,
    w: int,
    w_stride: int,
    num_columns: int,
    length: int,
    slices: int | None,
    out: int,
    out_stride: int,
    like: Stored,
) -> None:
    row = 0
    while row < num_rows:
        x_row, out_row = x + FLOAT_BYTES * x_stride * row, out + FLOAT_BYTES * out_stride * row
        rest = num_rows - row
        if num_columns == 4:
            if rest >= 3:
                _dot_3x4(x_row, x_stride, w, w_stride, length, slices, out_row, out_stride, like)
            elif rest == 2:
                _dot_2x4(x_row, x_stride, w, w_stride, length, slices, out_row, out_stride, like)
            else:
                _dot_1x4(x_row, x_stride, w, w_stride, length, slices, out_row, out_stride, like)
        elif rest >= 3:
            _dot_3x1(x_row, x_stride, w, w_stride, length, slices, out_row, out_stride, like)
        elif rest == 2:
            _dot_2x1(x_row, x_stride, w, w_stride, length, slices, out_row, out_stride, like)
        else:
            _dot_1x1(x_row, x_stride, w, w_stride, length, slices, out_row, out_stride, like)
        row += 3


@compiled
def dot_rows(
    x: int,
    x_stride: int,
    num_rows: int,
    w: int,
    w_stride: int,
    num_columns: int,
    length: int,
    slices: int | None,
    out: int,
    out_stride: int,
    like: Stored,
) -> None:
    """out[i, j] = x[i] · w[j] for `num_rows` x and `num_columns` w of `length` elements, or `slices` times so many."""
    column = 0
    while column < num_columns:
        columns = 4 if column + 4 <= num_columns else 1
        w_row, target = w + like.itemsize * w_stride * column, out + FLOAT_BYTES * column
        _dot_columns(x, x_stride, num_rows, w_row, w_stride, columns, length, slices, target, out_stride, like)
        column += columns


@compiled
def _add_weighted_columns(
    p: int,
    p_stride: int,
    num_rows: int,
    v: int,
    v_stride: int,
    count: int,
    width: int,
    out: int,
    out_stride: int,
    like: Stored,
) -> None:
    """Add to up to three rows: 32 columns at a time, then 8, then one."""
    column = 0
    while column < width:
        source, target = v + like.itemsize * column, out + FLOAT_BYTES * column
        if column + 4 * LANES <= width:
            if num_rows == 3:
                _sum_3x32(p, p_stride, source, v_stride, count, target, out_stride, like)
            elif num_rows == 2:
                _sum_2x32(p, p_stride, source, v_stride, count, target, out_stride, like)
            else:
                _sum_1x32(p, p_stride, source, v_stride, count, target, out_stride, like)
            column += 4 * LANES
        elif column + LANES <= width:
            if num_rows == 3:
                _sum_3x8(p, p_stride, source, v_stride, count, target, out_stride, like)
            elif num_rows == 2:
                _sum_2x8(p, p_stride, source, v_stride, count, target, out_stride, like)
            else:
                _sum_1x8(p, p_stride, source, v_stride, count, target, out_stride, like)
            column += LANES
        else:
            if num_rows == 3:
                _sum_3x1(p, p_stride, source, v_stride, count, target, out_stride, like)
            elif num_rows == 2:
                _sum_2x1(p, p_stride, source, v_stride, count, target, out_stride, like)
            else:
                _sum_1x1(p, p_stride, source, v_stride, count, target, out_stride, like)
            column += 1


@compiled
def add_weighted_rows(
    p: int,
    p_stride: int,
    num_rows: int,
    v: int,
    v_stride: int,
    count: int,
    width: int,
    out: int,
    out_stride: int,
    like: Stored,
) -> None:
    """out[i] += sum over s < `count` of p[i, s] * v[s], for `num_rows` rows of `width` elements."""
    row = 0
    while row < num_rows:
        weights, target = p + FLOAT_BYTES * p_stride * row, out + FLOAT_BYTES * out_stride * row
        rows = min(3, num_rows - row)
        _add_weighted_columns(weights, p_stride, rows, v, v_stride, count, width, target, out_stride, like)
        row += rows

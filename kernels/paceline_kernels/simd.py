"""Vector building blocks of the CPU kernels: sums in one fixed order, written as LLVM instructions.

Knows addresses, strides and float32. It refuses to know matrices, heads and blocks.

Why not leave it to the compiler: a float sum is fast only when reordered, and a compiler reorders each loop in its own
way, so that one row of a tile of four would differ in its last bits from the same row alone. Here every tile size runs
the same chain of fused multiply-adds per output element; rows and columns of a tile share loads, never arithmetic.

Order of a dot product: lane l of 8 adds the products of elements l, l + 8, l + 16, … one after the other; the lanes are
added as ((0+4)+(2+6))+((1+5)+(3+7)); the elements after the last full 8 follow one by one.
Order of a weighted sum: each output element adds its products one by one, in ascending order of the rows summed over.

Addresses are in bytes, as int64; strides and lengths are in elements. Bounds are the caller's to keep.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from paceline_kernels.jit import compiled

LANES = 8
FLOAT_BYTES = 4

_FLOAT = ir.FloatType()
_INT32 = ir.IntType(32)
_INT64 = ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)

# llvmlite has no types: this stands for its builder and its values.
_Ir = Any


def _constant(value: int) -> _Ir:
    return ir.Constant(_INT64, value)


def _fma(builder: _Ir, a: _Ir, b: _Ir, c: _Ir) -> _Ir:
    """a * b + c with one rounding, for scalars and vectors."""
    suffix = "f32" if a.type == _FLOAT else f"v{a.type.count}f32"
    function_type = ir.FunctionType(a.type, [a.type] * 3)
    insert: Any = cgutils.get_or_insert_function
    return builder.call(insert(builder.module, function_type, f"llvm.fma.{suffix}"), [a, b, c])


def _load(builder: _Ir, pointer: _Ir, index: _Ir, kind: _Ir) -> _Ir:
    return builder.load(builder.bitcast(builder.gep(pointer, [index]), kind.as_pointer()), align=FLOAT_BYTES)


def _store(builder: _Ir, value: _Ir, pointer: _Ir, index: _Ir) -> None:
    target = builder.bitcast(builder.gep(pointer, [index]), value.type.as_pointer())
    builder.store(value, target, align=FLOAT_BYTES)


def _pointers(builder: _Ir, address: _Ir, stride: _Ir, count: int) -> list[_Ir]:
    """The starts of `count` rows that lie `stride` elements apart."""
    first = builder.inttoptr(address, _FLOAT.as_pointer())
    return [builder.gep(first, [builder.mul(stride, _constant(i))]) for i in range(count)]


def _splat(builder: _Ir, scalar: _Ir, kind: _Ir) -> _Ir:
    if kind == _FLOAT:
        return scalar
    undefined = ir.Constant(kind, ir.Undefined)
    single = builder.insert_element(undefined, scalar, _INT32(0))
    return builder.shuffle_vector(single, undefined, ir.Constant(ir.VectorType(_INT32, LANES), [0] * LANES))


def _combine_lanes(builder: _Ir, vector: _Ir, combine: Callable[[_Ir, _Ir], _Ir]) -> _Ir:
    """Halve the vector until one lane is left, combining lane i with lane i + half."""
    half = vector.type.count // 2
    undefined = ir.Constant(vector.type, ir.Undefined)
    if half == 1:
        return combine(builder.extract_element(vector, _INT32(0)), builder.extract_element(vector, _INT32(1)))
    low = ir.Constant(ir.VectorType(_INT32, half), list(range(half)))
    high = ir.Constant(ir.VectorType(_INT32, half), list(range(half, 2 * half)))
    parts = [builder.shuffle_vector(vector, undefined, mask) for mask in (low, high)]
    return _combine_lanes(builder, combine(parts[0], parts[1]), combine)


def _loop(
    builder: _Ir, start: _Ir, stop: _Ir, step: int, carried: list[_Ir], body: Callable[[_Ir, list[_Ir]], list[_Ir]]
) -> list[_Ir]:
    """Emit `for index in range(start, stop, step): carried = body(index, carried)`; returns the final values."""
    before = builder.block
    head, inside, done = (builder.append_basic_block(name) for name in ("head", "inside", "done"))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(_INT64)
    index.add_incoming(start, before)
    values = [builder.phi(value.type) for value in carried]
    for value, initial in zip(values, carried, strict=True):
        value.add_incoming(initial, before)
    builder.cbranch(builder.icmp_signed("<", index, stop), inside, done)
    builder.position_at_end(inside)
    for value, following in zip(values, body(index, values), strict=True):
        value.add_incoming(following, builder.block)
    index.add_incoming(builder.add(index, _constant(step)), builder.block)
    builder.branch(head)
    builder.position_at_end(done)
    return values


def _emit_dots(builder: _Ir, xs: list[_Ir], ws: list[_Ir], length: _Ir) -> list[_Ir]:
    """Dot products of every row in `xs` with every row in `ws`, row after row, in the order the module names."""

    def step(kind: _Ir) -> Callable[[_Ir, list[_Ir]], list[_Ir]]:
        def add(index: _Ir, sums: list[_Ir]) -> list[_Ir]:
            columns = [_load(builder, w, index, kind) for w in ws]
            following = []
            for i, x in enumerate(xs):
                value = _load(builder, x, index, kind)
                row = sums[i * len(ws) : (i + 1) * len(ws)]
                following += [_fma(builder, value, column, total) for column, total in zip(columns, row, strict=True)]
            return following

        return add

    full = builder.and_(length, _constant(-LANES))
    zeros = [ir.Constant(_VECTOR, [0.0] * LANES)] * (len(xs) * len(ws))
    lanes = _loop(builder, _constant(0), full, LANES, zeros, step(_VECTOR))
    totals = [_combine_lanes(builder, vector, builder.fadd) for vector in lanes]
    return _loop(builder, full, length, 1, totals, step(_FLOAT))


def _dot_tile(num_rows: int, num_columns: int) -> Any:  # noqa: ANN401
    """An operation out[i, j] = x[i] · w[j] for a tile of `num_rows` by `num_columns`."""

    def typed(_context: _Ir, _a: _Ir, _sa: _Ir, _b: _Ir, _sb: _Ir, _n: _Ir, _out: _Ir, _so: _Ir) -> _Ir:
        signature = types.void(*[types.int64] * 7)

        def generate(context: _Ir, builder: _Ir, _signature: _Ir, args: _Ir) -> _Ir:
            x, x_stride, w, w_stride, length, out, out_stride = args
            xs = _pointers(builder, x, x_stride, num_rows)
            ws = _pointers(builder, w, w_stride, num_columns)
            totals = _emit_dots(builder, xs, ws, length)
            for i, row in enumerate(_pointers(builder, out, out_stride, num_rows)):
                for j in range(num_columns):
                    _store(builder, totals[i * num_columns + j], row, _constant(j))
            return context.get_dummy_value()

        return signature, generate

    return intrinsic(typed)


def _weighted_sum_tile(num_rows: int, num_vectors: int, lanes: int) -> Any:  # noqa: ANN401
    """An operation out[i, c] += sum over s of p[i, s] * v[s, c], for rows of `num_vectors * lanes` columns."""
    kind = _VECTOR if lanes == LANES else _FLOAT

    def typed(_context: _Ir, _a: _Ir, _sa: _Ir, _b: _Ir, _sb: _Ir, _n: _Ir, _out: _Ir, _so: _Ir) -> _Ir:
        signature = types.void(*[types.int64] * 7)

        def generate(context: _Ir, builder: _Ir, _signature: _Ir, args: _Ir) -> _Ir:
            p, p_stride, v, v_stride, count, out, out_stride = args
            ps = _pointers(builder, p, p_stride, num_rows)
            outs = _pointers(builder, out, out_stride, num_rows)
            columns = [_constant(j * lanes) for j in range(num_vectors)]
            values = builder.inttoptr(v, _FLOAT.as_pointer())

            def add(index: _Ir, sums: list[_Ir]) -> list[_Ir]:
                base = builder.mul(index, v_stride)
                row = [_load(builder, values, builder.add(base, column), kind) for column in columns]
                weights = [_splat(builder, _load(builder, weight, index, _FLOAT), kind) for weight in ps]
                weighted = [(weight, value) for weight in weights for value in row]
                return [_fma(builder, w, x, total) for (w, x), total in zip(weighted, sums, strict=True)]

            carried = [_load(builder, row, column, kind) for row in outs for column in columns]
            totals = iter(_loop(builder, _constant(0), count, 1, carried, add))
            for row in outs:
                for column in columns:
                    _store(builder, next(totals), row, column)
            return context.get_dummy_value()

        return signature, generate

    return intrinsic(typed)


def _typed_dot(_context: _Ir, _x: _Ir, _w: _Ir, _length: _Ir) -> _Ir:
    """The dot product of two rows at these addresses, as float32."""

    def generate(_: _Ir, builder: _Ir, _signature: _Ir, args: _Ir) -> _Ir:
        x, w, length = args
        one = _constant(0)
        return _emit_dots(builder, _pointers(builder, x, one, 1), _pointers(builder, w, one, 1), length)[0]

    return types.float32(types.int64, types.int64, types.int64), generate


def _typed_maximum(_context: _Ir, _x: _Ir, _length: _Ir) -> _Ir:
    """The largest of `length` floats at this address, -inf when there is none; NaNs are passed over."""

    def generate(_: _Ir, builder: _Ir, _signature: _Ir, args: _Ir) -> _Ir:
        x, length = args
        row = builder.inttoptr(x, _FLOAT.as_pointer())

        def larger(a: _Ir, b: _Ir) -> _Ir:
            return builder.select(builder.fcmp_ordered(">", a, b), a, b)

        def step(kind: _Ir) -> Callable[[_Ir, list[_Ir]], list[_Ir]]:
            return lambda index, best: [larger(_load(builder, row, index, kind), best[0])]

        full = builder.and_(length, _constant(-LANES))
        lowest = ir.Constant(_VECTOR, [float("-inf")] * LANES)
        lanes = _loop(builder, _constant(0), full, LANES, [lowest], step(_VECTOR))
        best = _combine_lanes(builder, lanes[0], larger)
        return _loop(builder, full, length, 1, [best], step(_FLOAT))[0]

    return types.float32(types.int64, types.int64), generate


dot: Any = intrinsic(_typed_dot)
maximum: Any = intrinsic(_typed_maximum)

# Four rows by three columns fill the sixteen vector registers of AVX2: twelve sums, three columns, one row.
_dot_4x3, _dot_3x3, _dot_2x3, _dot_1x3 = (_dot_tile(rows, 3) for rows in (4, 3, 2, 1))
_dot_4x1, _dot_3x1, _dot_2x1, _dot_1x1 = (_dot_tile(rows, 1) for rows in (4, 3, 2, 1))
_sum_3x32, _sum_2x32, _sum_1x32 = (_weighted_sum_tile(rows, 4, LANES) for rows in (3, 2, 1))
_sum_3x8, _sum_2x8, _sum_1x8 = (_weighted_sum_tile(rows, 1, LANES) for rows in (3, 2, 1))
_sum_3x1, _sum_2x1, _sum_1x1 = (_weighted_sum_tile(rows, 1, 1) for rows in (3, 2, 1))


@compiled
def address(array: npt.NDArray[Any]) -> int:
    """Where the array's first element lies, in bytes."""
    return np.int64(array.ctypes.data)  # type: ignore[return-value]


@compiled
def _dot_three_columns(
    x: int, x_stride: int, num_rows: int, w: int, w_stride: int, length: int, out: int, out_stride: int
) -> None:
    row = 0
    while row + 4 <= num_rows:
        x_row, out_row = x + FLOAT_BYTES * x_stride * row, out + FLOAT_BYTES * out_stride * row
        _dot_4x3(x_row, x_stride, w, w_stride, length, out_row, out_stride)
        row += 4
    x_row, out_row = x + FLOAT_BYTES * x_stride * row, out + FLOAT_BYTES * out_stride * row
    rest = num_rows - row
    if rest == 1:
        _dot_1x3(x_row, x_stride, w, w_stride, length, out_row, out_stride)
    elif rest == 2:
        _dot_2x3(x_row, x_stride, w, w_stride, length, out_row, out_stride)
    elif rest == 3:
        _dot_3x3(x_row, x_stride, w, w_stride, length, out_row, out_stride)


@compiled
def _dot_one_column(
    x: int, x_stride: int, num_rows: int, w: int, w_stride: int, length: int, out: int, out_stride: int
) -> None:
    row = 0
    while row + 4 <= num_rows:
        x_row, out_row = x + FLOAT_BYTES * x_stride * row, out + FLOAT_BYTES * out_stride * row
        _dot_4x1(x_row, x_stride, w, w_stride, length, out_row, out_stride)
        row += 4
    x_row, out_row = x + FLOAT_BYTES * x_stride * row, out + FLOAT_BYTES * out_stride * row
    rest = num_rows - row
    if rest == 1:
        _dot_1x1(x_row, x_stride, w, w_stride, length, out_row, out_stride)
    elif rest == 2:
        _dot_2x1(x_row, x_stride, w, w_stride, length, out_row, out_stride)
    elif rest == 3:
        _dot_3x1(x_row, x_stride, w, w_stride, length, out_row, out_stride)


@compiled
def dot_rows(
    x: int,
    x_stride: int,
    num_rows: int,
    w: int,
    w_stride: int,
    num_columns: int,
    length: int,
    out: int,
    out_stride: int,
) -> None:
    """out[i, j] = x[i] · w[j] for `num_rows` rows x and `num_columns` rows w of `length` elements."""
    column = 0
    while column + 3 <= num_columns:
        w_row, target = w + FLOAT_BYTES * w_stride * column, out + FLOAT_BYTES * column
        _dot_three_columns(x, x_stride, num_rows, w_row, w_stride, length, target, out_stride)
        column += 3
    while column < num_columns:
        w_row, target = w + FLOAT_BYTES * w_stride * column, out + FLOAT_BYTES * column
        _dot_one_column(x, x_stride, num_rows, w_row, w_stride, length, target, out_stride)
        column += 1


@compiled
def _add_weighted_columns(
    p: int, p_stride: int, num_rows: int, v: int, v_stride: int, count: int, width: int, out: int, out_stride: int
) -> None:
    """Add to up to three rows: 32 columns at a time, then 8, then one."""
    column = 0
    while column < width:
        source, target = v + FLOAT_BYTES * column, out + FLOAT_BYTES * column
        if column + 4 * LANES <= width:
            if num_rows == 3:
                _sum_3x32(p, p_stride, source, v_stride, count, target, out_stride)
            elif num_rows == 2:
                _sum_2x32(p, p_stride, source, v_stride, count, target, out_stride)
            else:
                _sum_1x32(p, p_stride, source, v_stride, count, target, out_stride)
            column += 4 * LANES
        elif column + LANES <= width:
            if num_rows == 3:
                _sum_3x8(p, p_stride, source, v_stride, count, target, out_stride)
            elif num_rows == 2:
                _sum_2x8(p, p_stride, source, v_stride, count, target, out_stride)
            else:
                _sum_1x8(p, p_stride, source, v_stride, count, target, out_stride)
            column += LANES
        else:
            if num_rows == 3:
                _sum_3x1(p, p_stride, source, v_stride, count, target, out_stride)
            elif num_rows == 2:
                _sum_2x1(p, p_stride, source, v_stride, count, target, out_stride)
            else:
                _sum_1x1(p, p_stride, source, v_stride, count, target, out_stride)
            column += 1


@compiled
def add_weighted_rows(
    p: int, p_stride: int, num_rows: int, v: int, v_stride: int, count: int, width: int, out: int, out_stride: int
) -> None:
    """out[i] += sum over s < `count` of p[i, s] * v[s], for `num_rows` rows of `width` elements."""
    row = 0
    while row < num_rows:
        weights, target = p + FLOAT_BYTES * p_stride * row, out + FLOAT_BYTES * out_stride * row
        rows = min(3, num_rows - row)
        _add_weighted_columns(weights, p_stride, rows, v, v_stride, count, width, target, out_stride)
        row += rows

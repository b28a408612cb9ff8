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

import llvmlite.binding
import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from paceline_kernels.llvm import (
    FLOAT,
    HALF,
    INT8,
    INT16,
    INT32,
    VECTOR,
    Ir,
    call,
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
_BYTES = ir.VectorType(INT8, 32)
_WORDS = ir.VectorType(INT16, 16)
_INTS = ir.VectorType(INT32, 8)

_config: Any = numba.config


def has_avx2() -> bool:
    """Whether compiled code may use the byte products of AVX2: numba compiles for this machine, and it has them."""
    is_native = not _config.CPU_NAME and not _config.CPU_FEATURES
    return is_native and bool(llvmlite.binding.get_host_cpu_features().get("avx2", False))


class _Products:
    """Byte products, by AVX2's instructions or by widening; the integers are the same."""

    def __init__(self, builder: Ir, *, avx2: bool) -> None:
        self._builder = builder
        self._avx2 = avx2

    def pairs(self, unsigned: Ir, signed: Ir) -> Ir:
        """[16] int16: unsigned[2 i] * signed[2 i] + unsigned[2 i + 1] * signed[2 i + 1]; both [32] int8."""
        builder = self._builder
        if self._avx2:
            return call(builder, "llvm.x86.avx2.pmadd.ub.sw", _WORDS, [unsigned, signed])
        evens, odds = ((self._half(unsigned, i), self._half(signed, i)) for i in (0, 1))
        products = [builder.mul(builder.zext(u, _WORDS), builder.sext(s, _WORDS)) for u, s in (evens, odds)]
        return builder.add(*products)

    def neighbours(self, words: Ir) -> Ir:
        """[8] int32: words[2 i] + words[2 i + 1]."""
        builder = self._builder
        if self._avx2:
            return call(builder, "llvm.x86.avx2.pmadd.wd", _INTS, [words, ir.Constant(_WORDS, [1] * 16)])
        return builder.add(*(builder.sext(self._half(words, i), _INTS) for i in (0, 1)))

    def signed_quads(self, weights: Ir, magnitudes: Ir, x: Ir) -> Ir:
        """[8] int32: the sums of four products of int8 with int8 each; `magnitudes` are those of the weights."""
        builder = self._builder
        if self._avx2:
            signed = call(builder, "llvm.x86.avx2.psign.b", _BYTES, [x, weights])
            return self.neighbours(self.pairs(magnitudes, signed))
        wide = ir.VectorType(INT32, 16)
        products = [
            builder.mul(*(builder.sext(self._half(operand, i), wide) for operand in (weights, x))) for i in (0, 1)
        ]
        pairs = builder.add(*products)
        return builder.add(*(self._half(pairs, i) for i in (0, 1)))

    def _half(self, vector: Ir, first: int) -> Ir:
        """Every second element, from `first` on."""
        count = vector.type.count
        mask = ir.Constant(ir.VectorType(INT32, count // 2), list(range(first, count, 2)))
        return self._builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)


# What a format's group contributes: from its address and offset in bytes, and the rows' inputs, two int32 vectors per
# row: the sums of outputs 0 to 7 and 8 to 15.
_GroupSums = Callable[[Ir, bool, Ir, Ir, list[Ir], Ir], list[Ir]]


def _row_quads(builder: Ir, xs: list[Ir], offset: Ir) -> list[Ir]:
    """Four inputs of each row, repeated for every lane."""
    quads = [splat(builder, load(builder, x, offset, INT32), _INTS) for x in xs]
    return [builder.bitcast(quad, _BYTES) for quad in quads]


def _int4_sums(builder: Ir, avx2: bool, w: Ir, start: Ir, xs: list[Ir], x_start: Ir) -> list[Ir]:
    products = _Products(builder, avx2=avx2)
    low_bits, shift = ir.Constant(_BYTES, [15] * 32), ir.Constant(_WORDS, [4] * 16)

    def add_quad(quad: Ir, sums: list[Ir]) -> list[Ir]:
        packed = load(builder, w, builder.add(start, builder.mul(quad, constant(32))), _BYTES)
        high = builder.bitcast(builder.lshr(builder.bitcast(packed, _WORDS), shift), _BYTES)
        weights = [builder.and_(packed, low_bits), builder.and_(high, low_bits)]
        rows = _row_quads(builder, xs, builder.add(x_start, builder.mul(quad, constant(4))))
        added = [products.pairs(weight, row) for row in rows for weight in weights]
        return [builder.add(total, pairs) for total, pairs in zip(sums, added, strict=True)]

    zeros = [ir.Constant(_WORDS, [0] * 16)] * (2 * len(xs))
    sums = _over_quads(builder, zeros, add_quad)
    return [products.neighbours(total) for total in sums]


def _int8_sums(builder: Ir, avx2: bool, w: Ir, start: Ir, xs: list[Ir], x_start: Ir) -> list[Ir]:
    products = _Products(builder, avx2=avx2)
    zero = ir.Constant(_BYTES, [0] * 32)

    def add_quad(quad: Ir, sums: list[Ir]) -> list[Ir]:
        first = builder.add(start, builder.mul(quad, constant(64)))
        weights = [load(builder, w, builder.add(first, constant(32 * half)), _BYTES) for half in (0, 1)]
        magnitudes = [builder.select(builder.icmp_signed("<", v, zero), builder.neg(v), v) for v in weights]
        rows = _row_quads(builder, xs, builder.add(x_start, builder.mul(quad, constant(4))))
        pairs = list(zip(weights, magnitudes, strict=True))
        added = [products.signed_quads(weight, magnitude, row) for row in rows for weight, magnitude in pairs]
        return [builder.add(total, quads) for total, quads in zip(sums, added, strict=True)]

    return _over_quads(builder, [ir.Constant(_INTS, [0] * 8)] * (2 * len(xs)), add_quad)


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


def _typed_largest(_context: Ir, _x: Ir, _count: Ir) -> Ir:
    """The largest magnitude of `count` floats, a multiple of 8; NaN if one is NaN."""

    def generate(_: Ir, builder: Ir, _signature: Ir, args: Ir) -> Ir:
        x, count = args
        row, magnitude = builder.inttoptr(x, FLOAT.as_pointer()), ir.Constant(_INTS, [0x7FFFFFFF] * 8)

        def larger(a: Ir, b: Ir) -> Ir:
            # Magnitudes order as integers do, and a NaN is above all others.
            return builder.select(builder.icmp_signed(">", a, b), a, b)

        def step(index: Ir, best: list[Ir]) -> list[Ir]:
            bits = builder.bitcast(load(builder, row, index, VECTOR), _INTS)
            return [larger(builder.and_(bits, magnitude), best[0])]

        best = loop(builder, constant(0), count, 8, [ir.Constant(_INTS, [0] * 8)], step)[0]
        for distance in (4, 2, 1):
            mask = ir.Constant(_INTS, [(lane + distance) % 8 for lane in range(8)])
            best = larger(best, builder.shuffle_vector(best, ir.Constant(_INTS, ir.Undefined), mask))
        return builder.bitcast(builder.extract_element(best, INT32(0)), FLOAT)

    return types.float32(types.int64, types.int64), generate


def _typed_round(_context: Ir, _x: Ir, _count: Ir, _factor: Ir, _out: Ir) -> Ir:
    """out[i] = x[i] * factor, rounded to even, as int8, 0 for NaN; returns their sum. `count` is a multiple of 8."""

    def generate(_: Ir, builder: Ir, _signature: Ir, args: Ir) -> Ir:
        x, count, factor, out = args
        row, target = builder.inttoptr(x, FLOAT.as_pointer()), builder.inttoptr(out, INT8.as_pointer())
        factors, zeros = splat(builder, factor, VECTOR), ir.Constant(VECTOR, [0.0] * 8)

        def step(index: Ir, total: list[Ir]) -> list[Ir]:
            scaled = builder.fmul(load(builder, row, index, VECTOR), factors)
            ordered = builder.select(builder.fcmp_ordered("ord", scaled, scaled), scaled, zeros)
            integers = builder.fptosi(call(builder, "llvm.rint.v8f32", VECTOR, [ordered]), _INTS)
            store(builder, builder.trunc(integers, ir.VectorType(INT8, 8)), target, index)
            return [builder.add(total[0], integers)]

        total = loop(builder, constant(0), count, 8, [ir.Constant(_INTS, [0] * 8)], step)[0]
        return call(builder, "llvm.vector.reduce.add.v8i32", INT32, [total])

    return types.int32(types.int64, types.int64, types.float32, types.int64), generate


largest_magnitude: Any = intrinsic(_typed_largest)
scale_and_round: Any = intrinsic(_typed_round)

_AVX2 = has_avx2()
int4_x1, int4_x2, int4_x4 = (dot_tile(rows, _int4_sums, INT4_GROUP_BYTES, avx2=_AVX2) for rows in (1, 2, 4))
int8_x1, int8_x2, int8_x4 = (dot_tile(rows, _int8_sums, INT8_GROUP_BYTES, avx2=_AVX2) for rows in (1, 2, 4))

"""Integer vectors as LLVM instructions: exact products of bytes and words, and rounding to them.

Knows what AVX2 and the VNNI of AVX-512 have instructions for; elsewhere the same integers are computed by widening
first. It refuses to know what is multiplied.
"""

import enum
from typing import Any

import llvmlite.binding
import numba
from llvmlite import ir
from numba import types

from paceline_kernels.compiler.llvm import (
    FLOAT,
    INT8,
    INT16,
    INT32,
    VECTOR,
    Ir,
    call,
    constant,
    load,
    loop,
    operation,
    splat,
    store,
)

BYTES = ir.VectorType(INT8, 32)
WORDS = ir.VectorType(INT16, 16)
INTS = ir.VectorType(INT32, 8)

_config: Any = numba.config
_VNNI_FEATURES = ("avx512f", "avx512bw", "avx512vl", "avx512vnni")


class Processor(enum.Enum):
    """What compiled code may multiply bytes and words with."""

    PORTABLE = "none"
    AVX2 = "AVX2"
    VNNI = "AVX-512 VNNI"

    @property
    def lanes(self) -> int:
        """How many 32-bit numbers a vector holds."""
        return 16 if self is Processor.VNNI else 8


def this_processor() -> Processor:
    """The best of what this machine has, if numba compiles for this machine."""
    if _config.CPU_NAME or _config.CPU_FEATURES:
        return Processor.PORTABLE
    has: dict[str, bool] = llvmlite.binding.get_host_cpu_features()
    if all(has.get(feature, False) for feature in _VNNI_FEATURES):
        return Processor.VNNI
    return Processor.AVX2 if has.get("avx2", False) else Processor.PORTABLE


class Products:
    """Products, by this processor's instructions or by widening; the integers are the same.

    Vectors of 32-bit numbers have `lanes` elements, those of words twice as many, those of bytes four times.
    """

    def __init__(self, builder: Ir, processor: Processor) -> None:
        self._builder = builder
        self._processor = processor
        self.lanes = processor.lanes
        self.bytes = ir.VectorType(INT8, 4 * self.lanes)
        self.words = ir.VectorType(INT16, 2 * self.lanes)
        self.ints = ir.VectorType(INT32, self.lanes)
        self.floats = ir.VectorType(FLOAT, self.lanes)
        self.zeros = ir.Constant(self.ints, [0] * self.lanes)

    def pairs(self, unsigned: Ir, signed: Ir) -> Ir:
        """Words: unsigned[2 i] * signed[2 i] + unsigned[2 i + 1] * signed[2 i + 1], of bytes; not for VNNI."""
        builder = self._builder
        if self._processor is Processor.AVX2:
            return call(builder, "llvm.x86.avx2.pmadd.ub.sw", WORDS, [unsigned, signed])
        evens, odds = ((self._half(unsigned, i), self._half(signed, i)) for i in (0, 1))
        products = [builder.mul(builder.zext(u, WORDS), builder.sext(s, WORDS)) for u, s in (evens, odds)]
        return builder.add(*products)

    def add_word_pairs(self, total: Ir, a: Ir, b: Ir) -> Ir:
        """total[i] + a[2 i] * b[2 i] + a[2 i + 1] * b[2 i + 1], of words."""
        if self._processor is Processor.VNNI:
            return self._vnni("vpdpwssd", total, a, b)
        return self._builder.add(total, self._word_pairs(a, b))

    def neighbours(self, words: Ir) -> Ir:
        """words[2 i] + words[2 i + 1]; not for VNNI."""
        return self._word_pairs(words, ir.Constant(WORDS, [1] * 16))

    def signed_quads(self, weights: Ir, magnitudes: Ir, x: Ir) -> Ir:
        """The sums of four products of int8 with int8 each; `magnitudes` are those of the weights; not for VNNI."""
        builder = self._builder
        if self._processor is Processor.AVX2:
            signed = call(builder, "llvm.x86.avx2.psign.b", BYTES, [x, weights])
            return self.neighbours(self.pairs(magnitudes, signed))
        wide = ir.VectorType(INT32, 16)
        products = [
            builder.mul(*(builder.sext(self._half(operand, i), wide) for operand in (weights, x))) for i in (0, 1)
        ]
        pairs = builder.add(*products)
        return builder.add(*(self._half(pairs, i) for i in (0, 1)))

    def add_quads(self, total: Ir, unsigned: Ir, signed: Ir) -> Ir:
        """total[i] + the sum of unsigned[4 i + j] * signed[4 i + j] over j of 0 to 3, of bytes; for VNNI alone."""
        return self._vnni("vpdpbusd", total, unsigned, signed)

    def _word_pairs(self, a: Ir, b: Ir) -> Ir:
        builder = self._builder
        if self._processor is Processor.AVX2:
            return call(builder, "llvm.x86.avx2.pmadd.wd", INTS, [a, b])
        evens, odds = ([builder.sext(self._half(operand, i), INTS) for operand in (a, b)] for i in (0, 1))
        return builder.add(builder.mul(*evens), builder.mul(*odds))

    def _vnni(self, name: str, total: Ir, a: Ir, b: Ir) -> Ir:
        # Before its version 22 LLVM takes 32-bit numbers for bytes and words; since then it puts that right itself.
        a, b = (self._builder.bitcast(operand, self.ints) for operand in (a, b))
        return call(self._builder, f"llvm.x86.avx512.{name}.512", self.ints, [total, a, b])

    def _half(self, vector: Ir, first: int) -> Ir:
        """Every second element, from `first` on."""
        count = vector.type.count
        mask = ir.Constant(ir.VectorType(INT32, count // 2), list(range(first, count, 2)))
        return self._builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)


@operation(types.float32, types.int64, types.int64)
def largest_magnitude(builder: Ir, x: Ir, count: Ir) -> Ir:
    """The largest magnitude of `count` floats, a multiple of 8; NaN if one is NaN."""
    row, magnitude = builder.inttoptr(x, FLOAT.as_pointer()), ir.Constant(INTS, [0x7FFFFFFF] * 8)

    def larger(a: Ir, b: Ir) -> Ir:
        # Magnitudes order as integers do, and a NaN is above all others.
        return builder.select(builder.icmp_signed(">", a, b), a, b)

    def step(index: Ir, best: list[Ir]) -> list[Ir]:
        bits = builder.bitcast(load(builder, row, index, VECTOR), INTS)
        return [larger(builder.and_(bits, magnitude), best[0])]

    best = loop(builder, constant(0), count, 8, [ir.Constant(INTS, [0] * 8)], step)[0]
    for distance in (4, 2, 1):
        mask = ir.Constant(INTS, [(lane + distance) % 8 for lane in range(8)])
        best = larger(best, builder.shuffle_vector(best, ir.Constant(INTS, ir.Undefined), mask))
    return builder.bitcast(builder.extract_element(best, INT32(0)), FLOAT)


@operation(types.int32, types.int64, types.int64, types.float32, types.int64)
def round_to_int8(builder: Ir, x: Ir, count: Ir, factor: Ir, out: Ir) -> Ir:
    """out[i] = x[i] * factor, rounded to even, as int8, 0 for NaN; returns their sum. `count` is a multiple of 8."""
    row, target = builder.inttoptr(x, FLOAT.as_pointer()), builder.inttoptr(out, INT8.as_pointer())
    factors, zeros = splat(builder, factor, VECTOR), ir.Constant(VECTOR, [0.0] * 8)

    def step(index: Ir, total: list[Ir]) -> list[Ir]:
        scaled = builder.fmul(load(builder, row, index, VECTOR), factors)
        ordered = builder.select(builder.fcmp_ordered("ord", scaled, scaled), scaled, zeros)
        integers = builder.fptosi(call(builder, "llvm.rint.v8f32", VECTOR, [ordered]), INTS)
        store(builder, builder.trunc(integers, ir.VectorType(INT8, 8)), target, index)
        return [builder.add(total[0], integers)]

    total = loop(builder, constant(0), count, 8, [ir.Constant(INTS, [0] * 8)], step)[0]
    return call(builder, "llvm.vector.reduce.add.v8i32", INT32, [total])

"""Sums of products of one group, exact integers: 32 int8 inputs of some rows times packed weights of sixteen outputs.

Knows the bytes of a packed group (`packing` writes them) and what processors have instructions for; not scales.

The inputs of a group are taken four at a time, because processors add four byte products into each 32-bit lane.

No saturation: the byte product of AVX2 adds two 16-bit products with saturation. Weights of 0 to 15 times activations
of -127 to 127 stay below 3,811 per pair, so that a whole group (8 pairs per lane, 30,480) fits into 16 bits. For int8
weights |w| ≤ 128 is multiplied with the activation under w's sign: at most 32,512.

VNNI adds four products to 32 bits in one instruction, of bytes without a sign with bytes that have one. int8 weights
are multiplied as w + 128, and 128 times the sum of the row's integers is taken off as float32, which is exact because
all of it stays below 2**24. Where the processor has neither, the same integers are computed by widening first.
"""

from collections.abc import Callable, Sequence

from llvmlite import ir

from paceline_kernels.compiler.llvm import INT32, Ir, constant, load, loop, opaque, splat
from paceline_kernels.quantized_linear.packing import GROUP, TILE
from paceline_kernels.vector.integers import Processor, Products

_QUADS = GROUP // 4
_INT4_QUAD_BYTES = 4 * TILE // 2
_INT8_QUAD_BYTES = 4 * TILE


class GroupSums:
    """Emits the sums for `bits`, 4 or 8, per weight: int32 vectors, `vectors` of them for a tile of sixteen outputs."""

    def __init__(self, builder: Ir, processor: Processor, bits: int) -> None:
        self._builder = builder
        self._products = Products(builder, processor)
        self._bits = bits
        self._is_vnni = processor is Processor.VNNI
        self.lanes = processor.lanes
        self.vectors = TILE // processor.lanes
        self.excess = 128 if self._is_vnni and bits == 8 else 0  # what every weight is multiplied as, above itself

    def emit(self, tiles: Sequence[Ir], start: Ir, rows: Sequence[Ir], row_start: Ir) -> list[Ir]:
        """The sums, row after row, of a row tile after tile; groups begin `start` and `row_start` bytes on."""
        if self._is_vnni:
            return self._at_once(tiles, start, rows, row_start)
        (tile,) = tiles
        return (self._int4 if self._bits == 4 else self._int8)(tile, start, rows, row_start)

    def _row_quads(self, rows: Sequence[Ir], offset: Ir) -> list[Ir]:
        """Four inputs of each row, repeated for every lane."""
        builder, products = self._builder, self._products
        quads = [splat(builder, load(builder, row, offset, INT32), products.ints) for row in rows]
        return [builder.bitcast(quad, products.bytes) for quad in quads]

    def _at_once(self, tiles: Sequence[Ir], start: Ir, rows: Sequence[Ir], row_start: Ir) -> list[Ir]:
        builder, products = self._builder, self._products
        weigh = self._vnni_int4 if self._bits == 4 else self._vnni_int8
        sums = [products.zeros] * (len(rows) * len(tiles))
        for quad in range(_QUADS):
            weights = [weigh(tile, start, quad) for tile in tiles]
            inputs = self._row_quads(rows, builder.add(row_start, constant(4 * quad)))
            pairs = [(of_tile, of_row) for of_row in inputs for of_tile in weights]
            sums = [products.add_quads(total, *pair) for total, pair in zip(sums, pairs, strict=True)]
        return sums

    def _vnni_int4(self, tile: Ir, start: Ir, quad: int) -> Ir:
        """Low halves of the bytes in the lower lanes, high halves in the upper ones."""
        builder, products, half = self._builder, self._products, self.lanes // 2
        at = builder.add(start, constant(_INT4_QUAD_BYTES * quad))
        packed = load(builder, tile, at, ir.VectorType(INT32, half))
        twice = ir.Constant(products.ints, [*range(half)] * 2)
        both = builder.shuffle_vector(packed, ir.Constant(packed.type, ir.Undefined), twice)
        shifted = builder.lshr(both, ir.Constant(products.ints, [0] * half + [4] * half))
        low_bits = ir.Constant(products.ints, [0x0F0F0F0F] * self.lanes)
        return builder.bitcast(builder.and_(shifted, low_bits), products.bytes)

    def _vnni_int8(self, tile: Ir, start: Ir, quad: int) -> Ir:
        """Their sign turned: a weight and 128, as a byte without a sign."""
        builder, kind = self._builder, self._products.bytes
        packed = load(builder, tile, builder.add(start, constant(_INT8_QUAD_BYTES * quad)), kind)
        return builder.xor(packed, ir.Constant(kind, [-128] * kind.count))

    def _int4(self, tile: Ir, start: Ir, rows: Sequence[Ir], row_start: Ir) -> list[Ir]:
        builder, products = self._builder, self._products
        low_bits, shift = ir.Constant(products.bytes, [15] * 32), ir.Constant(products.words, [4] * 16)

        def add_quad(quad: Ir, sums: list[Ir]) -> list[Ir]:
            at = builder.add(start, builder.mul(quad, constant(_INT4_QUAD_BYTES)))
            packed = load(builder, tile, at, products.bytes)
            high = builder.bitcast(builder.lshr(builder.bitcast(packed, products.words), shift), products.bytes)
            weights = [builder.and_(packed, low_bits), builder.and_(high, low_bits)]
            inputs = self._row_quads(rows, builder.add(row_start, builder.mul(quad, constant(4))))
            added = [products.pairs(weight, of_row) for of_row in inputs for weight in weights]
            return [builder.add(total, pairs) for total, pairs in zip(sums, added, strict=True)]

        zeros = [ir.Constant(products.words, [0] * 16)] * (2 * len(rows))
        return [products.neighbours(total) for total in self._over_quads(zeros, add_quad)]

    def _int8(self, tile: Ir, start: Ir, rows: Sequence[Ir], row_start: Ir) -> list[Ir]:
        builder, products = self._builder, self._products
        zero = ir.Constant(products.bytes, [0] * 32)

        def add_quad(quad: Ir, sums: list[Ir]) -> list[Ir]:
            first = builder.add(start, builder.mul(quad, constant(_INT8_QUAD_BYTES)))
            weights = [load(builder, tile, builder.add(first, constant(32 * half)), products.bytes) for half in (0, 1)]
            magnitudes = [builder.select(builder.icmp_signed("<", v, zero), builder.neg(v), v) for v in weights]
            inputs = self._row_quads(rows, builder.add(row_start, builder.mul(quad, constant(4))))
            pairs = list(zip(weights, magnitudes, strict=True))
            added = [products.signed_quads(*pair, of_row) for of_row in inputs for pair in pairs]
            return [builder.add(total, quads) for total, quads in zip(sums, added, strict=True)]

        return self._over_quads([products.zeros] * (2 * len(rows)), add_quad)

    def _over_quads(self, sums: list[Ir], add_quad: Callable[[Ir, list[Ir]], list[Ir]]) -> list[Ir]:
        """All quads of a group, two in each turn of a loop that the compiler leaves a loop."""
        builder = self._builder

        def add_two(quad: Ir, totals: list[Ir]) -> list[Ir]:
            return add_quad(builder.add(quad, constant(1)), add_quad(quad, totals))

        return loop(builder, constant(0), opaque(builder, _QUADS), 2, sums, add_two)

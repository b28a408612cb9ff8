"""Philox4x32-10, a generator of random numbers without state: a key and a counter in, four 32-bit words out.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011, https://doi.org/10.1145/2063384.2063405.
"""

from llvmlite import ir
from numba import types

from paceline_kernels.compiler.llvm import INT32, INT64, LANES, Ir, constant, operation, splat, store

# Counters that are worked on at once, and the words that come of them.
NUM_COUNTERS = LANES
NUM_WORDS = 4 * NUM_COUNTERS

_NUM_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
# A counter's words are 32 bits wide in lanes of 64: what a multiplication of two gives fits into its lane.
_WIDE = ir.VectorType(INT64, NUM_COUNTERS)
_LOW_HALF = ir.Constant(_WIDE, [0xFFFFFFFF] * NUM_COUNTERS)
_HIGH = ir.Constant(_WIDE, [32] * NUM_COUNTERS)


def _rounds(builder: Ir, counter: list[Ir], key: list[Ir]) -> list[Ir]:
    """The words of counters, lane by lane. counter: four vectors; key: two uint32."""
    c0, c1, c2, c3 = counter
    multipliers = [ir.Constant(_WIDE, [multiplier] * NUM_COUNTERS) for multiplier in _MULTIPLIERS]
    for number in range(_NUM_ROUNDS):
        keys = [builder.add(half, INT32(number * weyl % 2**32)) for half, weyl in zip(key, _WEYL, strict=True)]
        k0, k1 = (splat(builder, builder.zext(half, INT64), _WIDE) for half in keys)
        product_0, product_1 = builder.mul(multipliers[0], c0), builder.mul(multipliers[1], c2)
        c0 = builder.xor(builder.xor(builder.lshr(product_1, _HIGH), c1), k0)
        c2 = builder.xor(builder.xor(builder.lshr(product_0, _HIGH), c3), k1)
        c1, c3 = builder.and_(product_1, _LOW_HALF), builder.and_(product_0, _LOW_HALF)
    return [c0, c1, c2, c3]


def _side_by_side(builder: Ir, words: list[Ir]) -> Ir:
    """The four words of the first counter, those of the second, and so on."""
    narrow = [builder.trunc(word, ir.VectorType(INT32, NUM_COUNTERS)) for word in words]
    pairs = [2 * lane + half for lane in range(NUM_COUNTERS) for half in (0, 1)]
    # Lane i of the first vector of a pair, then lane i of the second.
    order = [lane // 2 + (lane % 2) * NUM_COUNTERS for lane in pairs]
    mask = ir.Constant(ir.VectorType(INT32, 2 * NUM_COUNTERS), order)
    first, second = (builder.shuffle_vector(narrow[i], narrow[i + 1], mask) for i in (0, 2))
    fours = [
        start + side * 2 * NUM_COUNTERS + word
        for start in range(0, 2 * NUM_COUNTERS, 2)
        for side in (0, 1)
        for word in (0, 1)
    ]
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(INT32, NUM_WORDS), fours))


@operation(types.void, types.int64, *[types.uint32] * 4)
def philox4x32(builder: Ir, address: Ir, c0: Ir, c1: Ir, k0: Ir, k1: Ir) -> None:
    """Write the NUM_WORDS words of the counters (c0 + i, c1, 0, 0), i < NUM_COUNTERS, under the key (k0, k1)."""
    ascending = ir.Constant(ir.VectorType(INT32, NUM_COUNTERS), list(range(NUM_COUNTERS)))
    first = builder.add(splat(builder, c0, ascending.type), ascending)
    zero = ir.Constant(_WIDE, [0] * NUM_COUNTERS)
    counter = [builder.zext(first, _WIDE), splat(builder, builder.zext(c1, INT64), _WIDE), zero, zero]
    words = _side_by_side(builder, _rounds(builder, counter, [k0, k1]))
    store(builder, words, builder.inttoptr(address, INT32.as_pointer()), constant(0))

"""sampling on a GPU: the noise of the package's docstring, and a bound on it that costs no logarithm.

Knows random words and what is made of them. It refuses to know logits.
"""

import triton
import triton.language as tl

# Of the bound: (127 + 32) ln 2, and ln 2 / 2**23.
NOISE_AT_ZERO_BITS = tl.constexpr(159 * 0.6931471805599453)
NOISE_PER_BIT = tl.constexpr(0.6931471805599453 / 2**23)
_MULTIPLIER_0, _MULTIPLIER_1 = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57)
_WEYL_0, _WEYL_1 = tl.constexpr(0x9E3779B9), tl.constexpr(0xBB67AE85)
# The bits of 1.0, and the largest float below it.
_ONE_BITS = tl.constexpr(0x3F800000)
_ONE_LESS = tl.constexpr(1.0 - 2.0**-24)


@triton.jit
def random_words(seed, offset, counters):
    """Philox4x32-10 under the key `seed`, int64, of counters [..., n] int32 at an offset: [..., n, 2, 2] uint32.

    Reshaped to [..., 4 * n] these are the words of tokens 4 * counters and after, in order. Written out because one
    product of 64 bits is one instruction, where `tl.philox` takes two for its halves.
    """
    key_0, key_1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    word_0, word_1 = counters.to(tl.uint32), offset.to(tl.uint32)
    word_2, word_3 = tl.full([], 0, tl.uint32), tl.full([], 0, tl.uint32)
    for _ in tl.static_range(10):
        product_0, product_1 = word_0.to(tl.uint64) * _MULTIPLIER_0, word_2.to(tl.uint64) * _MULTIPLIER_1
        word_0 = (product_1 >> 32).to(tl.uint32) ^ word_1 ^ key_0
        word_2 = (product_0 >> 32).to(tl.uint32) ^ word_3 ^ key_1
        word_1, word_3 = product_1.to(tl.uint32), product_0.to(tl.uint32)
        key_0, key_1 = key_0 + _WEYL_0, key_1 + _WEYL_1
    return tl.join(tl.join(word_0, word_2), tl.join(word_1, word_3))


@triton.jit
def gumbel(words):
    """The noise made of words."""
    return -tl.log(-tl.log(_uniform(words)))


@triton.jit
def bits_of_rest(words):
    """Of each word an integer: NOISE_AT_ZERO_BITS less NOISE_PER_BIT times that is a bound on the noise.

    -ln u >= 1 - u, so that the noise is at most -ln(1 - u); 2**32 times 1 - u is the word turned over, with its lower 9
    bits 256. A float's bits, taken as an integer, are a line through the powers of two that lies below its logarithm:
    log2(x) >= bits / 2**23 - 127. It is at most 0.06 too high, and tight where noise is loud.
    """
    rests = (words ^ 0xFFFFFFFF) & 0xFFFFFE00 | 0x100
    return rests.to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def _uniform(words):
    """((word >> 9) + 0.5) / 2**23: a float in [1, 2) with these bits for a fraction, less 1 - 2**-24, is exact."""
    return ((words >> 9) | _ONE_BITS).to(tl.float32, bitcast=True) - _ONE_LESS

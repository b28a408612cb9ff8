"""The loudest token of a row: where the largest sum of scaled logit and noise is, with noise drawn as seldom as can be.

Knows the noise that the package's docstring defines. The words that make it are drawn for eight counters at once, for
tiles of tokens of which one could still win; the logarithms are taken only of words that a bound does not rule out.
"""

import numpy as np
import numpy.typing as npt

from paceline_kernels.compiler import jit
from paceline_kernels.sampling.contenders import NONE, contender
from paceline_kernels.vector import simd
from paceline_kernels.vector.philox import NUM_WORDS, philox4x32

_Float32Array = npt.NDArray[np.float32]
_UInt32Array = npt.NDArray[np.uint32]

_MAX_GUMBEL = np.float32(16.64)
_TILE = 8 * NUM_WORDS  # tokens
_LOW_HALF = np.uint64(0xFFFFFFFF)
_HALF = np.float32(0.5)
_STEPS = 1 << 23
# Of the bound: ln 2, ln 2 / 2**23, and more than all roundings of bound and noise together.
_BOUND_AT_ZERO_BITS = np.float32(150 * np.log(2.0) + 1e-3)
_BOUND_PER_BIT = np.float32(np.log(2.0) / _STEPS)


@jit.compiled
def gumbel(word: np.uint32) -> jit.Float32:
    """The noise made of a random word, see the package's docstring."""
    u = (np.float32(word >> np.uint32(9)) + _HALF) * np.float32(2.0**-23)
    return -np.log(-np.log(u))


@jit.compiled
def gumbel_bound(word: np.uint32) -> jit.Float32:
    """A number that the noise made of the word does not exceed, without logarithms and at most 0.07 above -ln(1 - u).

    -ln u >= 1 - u, so the noise is at most -ln(1 - u) = 23 ln 2 - ln v with v = 2**23 (1 - u). A float's bits, taken
    as an integer, are a line through the powers of two that lies below its logarithm: log2 v >= bits / 2**23 - 127.
    """
    v = np.float32(np.float32(np.int32(_STEPS) - np.int32(word >> np.uint32(9))) - _HALF)
    return _BOUND_AT_ZERO_BITS - np.float32(np.float32(v).view(np.int32)) * _BOUND_PER_BIT


@jit.compiled
def loudest(
    scaled: _Float32Array, begin: int, threshold: jit.Float32, last_at_threshold: int, seed: int, offset: int
) -> int:
    """The contender with the largest score among the tokens above the threshold, or at it and not after the last.

    scaled: of the tokens from `begin` on, a multiple of 4; none is NaN or above all that is finite. NONE of none.
    """
    num_tiles = (len(scaled) + _TILE - 1) // _TILE
    peaks = np.empty(num_tiles, dtype=np.float32)
    for tile in range(num_tiles):
        start = tile * _TILE
        peaks[tile] = simd.maximum(simd.address(scaled) + 4 * start, min(_TILE, len(scaled) - start))
    # What the likeliest token's tile brings rules out most of the others.
    likeliest = int(np.argmax(peaks)) if num_tiles else -1
    words, bounds = np.empty(_TILE, dtype=np.uint32), np.empty(_TILE, dtype=np.float32)
    best_token, best = len(scaled), np.float32(-np.inf)
    for number in range(num_tiles + 1 if num_tiles else 0):
        tile = likeliest if number == 0 else number - 1
        if (number > 0 and tile == likeliest) or peaks[tile] < threshold or peaks[tile] + _MAX_GUMBEL < best:
            continue
        start = tile * _TILE
        _bound_scores(scaled[start : start + _TILE], begin + start, seed, offset, words, bounds)
        if simd.maximum(simd.address(bounds), min(_TILE, len(scaled) - start)) < best:
            continue
        for i in range(min(_TILE, len(scaled) - start)):
            token, value = start + i, scaled[start + i]
            is_left = value > threshold or (value == threshold and token <= last_at_threshold)
            if bounds[i] >= best and is_left:
                score = value + gumbel(words[i])
                if score > best or (score == best and token < best_token):
                    best_token, best = token, score
    return contender(best, begin + best_token) if best_token < len(scaled) else NONE


@jit.compiled
def _bound_scores(
    scaled: _Float32Array, start: int, seed: int, offset: int, words: _UInt32Array, bounds: _Float32Array
) -> None:
    """The words of a tile of tokens that begins at `start`, and for each token what its score does not exceed."""
    key_low = np.uint32(np.uint64(seed) & _LOW_HALF)
    key_high = np.uint32(np.uint64(seed) >> np.uint64(32))
    for first in range(0, len(scaled), NUM_WORDS):
        counter = np.uint32((start + first) // 4)
        philox4x32(simd.address(words) + 4 * first, counter, np.uint32(offset), key_low, key_high)
    for i in range(len(scaled)):
        bounds[i] = scaled[i] + gumbel_bound(words[i])

"""A token and its number as one integer, of which the largest is the largest number's, and of those the lowest token's.

So ranks that each have some of the tokens find the best of all by the largest of a few integers. Knows float32 and
tokens below 2**31.
"""

import numpy as np
import numpy.typing as npt

from paceline_kernels.compiler import jit
from paceline_kernels.vector import simd

_Float32Array = npt.NDArray[np.float32]

KEY_BITS = 32
NONE = -(2**63)
"""Less than any."""
_SIGN_BITS = np.int32(31)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_MAX_TOKEN = 0x7FFFFFFF
_ZERO = np.float32(0.0)
_TILE = 256


@jit.compiled
def key_of(value: jit.Float32) -> jit.Int32:
    """Integers in the order of the floats; -0.0 is 0.0. Beyond all others is NaN."""
    bits = np.float32(value + _ZERO).view(np.int32)
    return np.int32(bits ^ ((bits >> _SIGN_BITS) & _MAGNITUDE))


@jit.compiled
def value_of_key(key: jit.Int32) -> jit.Float32:
    return np.int32(key ^ ((key >> _SIGN_BITS) & _MAGNITUDE)).view(np.float32)


@jit.compiled
def contender(value: jit.Float32, token: jit.Int64) -> jit.Int64:
    return (np.int64(key_of(value)) << KEY_BITS) | np.int64(_MAX_TOKEN - token)


@jit.compiled
def value_of(packed: jit.Int64) -> jit.Float32:
    return value_of_key(np.int32(packed >> KEY_BITS))


@jit.compiled
def token_of(packed: jit.Int64) -> jit.Int64:
    return _MAX_TOKEN - (packed & _MAX_TOKEN)


@jit.compiled
def best_of(values: _Float32Array, start: int) -> jit.Int64:
    """The contender of the largest value. values: of the tokens from `start` on, none of them NaN."""
    largest, tile = np.float32(-np.inf), 0
    for first in range(0, len(values), _TILE):
        peak = simd.maximum(simd.address(values) + simd.FLOAT_BYTES * first, min(_TILE, len(values) - first))
        if peak > largest:
            largest, tile = peak, first
    for token in range(tile, len(values)):
        if values[token] == largest:
            return contender(largest, start + token)
    return NONE

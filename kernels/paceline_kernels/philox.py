"""Philox4x32-10, a generator of random numbers without state: a key and a counter in, four 32-bit words out.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011, https://doi.org/10.1145/2063384.2063405.
"""

import numpy as np

from paceline_kernels.jit import compiled

_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint32(0x9E3779B9)
_WEYL_1 = np.uint32(0xBB67AE85)
_HIGH = np.uint64(32)

_Words = tuple[np.uint32, np.uint32, np.uint32, np.uint32]


@compiled
def philox4x32(c0: np.uint32, c1: np.uint32, c2: np.uint32, c3: np.uint32, k0: np.uint32, k1: np.uint32) -> _Words:
    """The four words of the counter (c0, c1, c2, c3) under the key (k0, k1), after ten rounds."""
    for _ in range(10):
        product_0 = _MULTIPLIER_0 * np.uint64(c0)
        product_1 = _MULTIPLIER_1 * np.uint64(c2)
        high_0, high_1 = np.uint32(product_0 >> _HIGH), np.uint32(product_1 >> _HIGH)
        c0, c1 = np.uint32(high_1 ^ c1 ^ k0), np.uint32(product_1)
        c2, c3 = np.uint32(high_0 ^ c3 ^ k1), np.uint32(product_0)
        k0, k1 = np.uint32(k0 + _WEYL_0), np.uint32(k1 + _WEYL_1)
    return c0, c1, c2, c3

"""The noise of draws for CPUs: word by word what the reference has, and below its bound."""

import numpy as np
import pytest

from paceline_kernels.compiler.jit import compiled_for_python
from paceline_kernels.sampling import noise, reference
from paceline_kernels.vector.philox import NUM_COUNTERS, NUM_WORDS, philox4x32
from paceline_kernels.vector.simd import address

# From kat_vectors of the Random123 library: counter, key, output.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@compiled_for_python
def _philox(words, c0, c1, k0, k1):
    philox4x32(address(words), np.uint32(c0), np.uint32(c1), np.uint32(k0), np.uint32(k1))


@compiled_for_python
def _noise_and_bound(words, gumbels, bounds):
    for i in range(len(words)):
        gumbels[i], bounds[i] = noise.gumbel(words[i]), noise.gumbel_bound(words[i])


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(counter, key, expected):
    assert tuple(reference.philox4x32(np.array([counter], dtype=np.uint64), key)[0]) == expected


@pytest.mark.parametrize(("c0", "c1"), [(0, 0), (5, 0xFFFFFFFF), (0xFFFFFFFF, 7), (0x243F6A88, 0x85A308D3)])
@pytest.mark.parametrize("key", [(0, 0), (0xFFFFFFFF, 0xFFFFFFFF), (0xA4093822, 0x299F31D0)])
def test_compiled_philox_works_on_ascending_counters_at_once(c0, c1, key):
    """Word by word what numpy gives; a counter beyond 32 bits begins at zero again."""
    words = np.empty(NUM_WORDS, dtype=np.uint32)
    _philox(words, c0, c1, *key)
    counters = np.array([((c0 + i) % 2**32, c1, 0, 0) for i in range(NUM_COUNTERS)], dtype=np.uint64)
    assert words.tolist() == reference.philox4x32(counters, key).reshape(-1).tolist()


def test_no_noise_exceeds_its_bound():
    """At both ends of the range and at every 97th word between; the bound is useful where noise is loud."""
    ranks = np.concatenate((np.arange(5000), np.arange(5000, 2**23, 97), np.arange(2**23 - 5000, 2**23)))
    words = (ranks << 9).astype(np.uint32)
    gumbels, bounds = np.empty(len(words), dtype=np.float32), np.empty(len(words), dtype=np.float32)
    _noise_and_bound(words, gumbels, bounds)
    assert (gumbels <= bounds).all()
    assert (bounds - gumbels)[gumbels > 4].max() < 0.08


def test_the_noise_of_a_token_is_a_word_of_its_own():
    """Token 6 at offset 2 takes word 2 of counter (1, 2, 0, 0), seed halves low first: written out once more."""
    words = reference.philox4x32(np.array([[1, 2, 0, 0]], dtype=np.uint64), (0xDDDDDDDD, 0xAAAAAAAA))
    u = (float(words[0, 2] >> 9) + 0.5) / 2**23
    noise = reference.gumbel_noise(8, seed=0xAAAAAAAADDDDDDDD, offset=2)
    assert noise[6] == pytest.approx(-np.log(-np.log(u)), rel=1e-5)

"""The noise of draws for GPUs: word by word what the reference has, and below its bound."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from paceline_kernels.sampling import reference
from paceline_kernels.sampling.triton.noise import (
    NOISE_AT_ZERO_BITS,
    NOISE_PER_BIT,
    bits_of_rest,
    gumbel,
    random_words,
)


@triton.jit
def _noise_kernel(counters, words, noise, bits, seeds, offsets, COUNT: tl.constexpr):  # noqa: N803
    ours = random_words(tl.load(seeds), tl.load(offsets), tl.load(counters + tl.arange(0, COUNT)))
    ours = tl.reshape(ours, [4 * COUNT])
    places = tl.arange(0, 4 * COUNT)
    tl.store(words + places, ours.to(tl.int32, bitcast=True))
    tl.store(noise + places, gumbel(ours))
    tl.store(bits + places, bits_of_rest(ours))


@pytest.mark.parametrize(("seed", "offset"), [(0, 0), (-1, 2**31 - 1), (0x299F31D0_A4093822, 7)])
def test_noise_is_that_of_the_definition_and_below_its_bound(gpu, place, seed, offset):
    counters = torch.arange(2**14 - 64, 2**14 + 64, dtype=torch.int32)
    words, bits = (place(torch.zeros(512, dtype=torch.int32)) for _ in range(2))
    noise, seeds, offsets = place(torch.zeros(512)), torch.tensor([seed]), torch.tensor([offset], dtype=torch.int32)
    _noise_kernel[(1,)](place(counters), words, noise, bits, place(seeds), place(offsets), COUNT=128)
    columns = np.stack([counters.numpy(), np.full(128, offset), np.zeros(128), np.zeros(128)], axis=1)
    expected = reference.philox4x32(columns.astype(np.uint64), (seed % 2**64 % 2**32, (seed % 2**64) >> 32)).ravel()
    assert (words.cpu().numpy().view(np.uint32) == expected).all()
    u = ((expected >> 9) + 0.5) / 2**23
    ours = noise.cpu().numpy()
    bounds = NOISE_AT_ZERO_BITS.value - NOISE_PER_BIT.value * bits.cpu().numpy().astype(float)
    np.testing.assert_allclose(ours, -np.log(-np.log(u)), rtol=1e-6, atol=1e-6)
    assert (ours <= bounds + 1e-5).all()
    assert (bounds - ours)[ours > 4].max() < 0.08

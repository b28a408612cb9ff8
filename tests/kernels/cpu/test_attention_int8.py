"""attention over int8: tiles against whole numbers, weights against float64; test_decoder has what is made of them."""

import numba
import numpy as np
import pytest

from kernel_rig.processors import usable_processors
from paceline_kernels.attention import int8, int8_tiles
from paceline_kernels.vector.integers import this_processor
from paceline_kernels.vector.simd import address

PROCESSORS = pytest.mark.parametrize("processor", usable_processors(), ids=lambda processor: processor.name)
ROWS = pytest.mark.parametrize("num_rows", [1, 6])
TWO_BLOCKS = np.array([2, 0], np.int32)


def words(*shape):
    """Random 16-bit integers, the largest and the smallest among them."""
    numbers = np.random.default_rng(1).integers(-32767, 32768, shape).astype(np.int16)
    numbers[0, :2], numbers[0, 2:4] = 32767, -32767
    return numbers


def small_bytes(*shape):
    """Random 8-bit integers, -128 too, which is never written but may lie in memory."""
    return np.random.default_rng(2).integers(-128, 128, shape).astype(np.int8)


@ROWS
@PROCESSORS
def test_scores_are_exact_sums_scaled(num_rows, processor):
    tile, lanes = int8_tiles.score_tile(num_rows, processor), processor.lanes
    x, keys, out = words(num_rows, 64), small_bytes(32, 48, 2), np.full((num_rows, 48), np.nan, np.float32)
    row_scales, slot_scales = (np.linspace(0.5, 2, count, dtype=np.float32) for count in (num_rows, 48))

    @numba.njit
    def call(x, keys, row_scales, slot_scales, out):
        second = (keys + 2 * 32, slot_scales + 4 * 32, out + 4 * 32)
        tile(x, 64, 32, 96, row_scales, 48, keys, slot_scales, out, *second)

    call(*(part.ctypes.data for part in (x, keys, row_scales, slot_scales, out)))
    sums = np.einsum("rpi,psi->rs", x.reshape(num_rows, 32, 2).astype(np.int64), keys)
    expected = sums.astype(np.float32) * row_scales[:, None] * slot_scales
    computed = [*range(lanes), *range(32, 32 + lanes)]
    assert np.array_equal(out[:, computed], expected[:, computed])
    assert np.isnan(np.delete(out, computed, axis=1)).all()


@ROWS
@PROCESSORS
@pytest.mark.parametrize("apart", [16, 0], ids=["two vectors", "one vector twice"])
def test_weighted_values_are_exact_sums_scaled(num_rows, processor, apart):
    """Over the slots of two blocks of three, in the table's order; of 48 dimensions some behind the first 16."""
    tile, lanes = int8_tiles.value_tile(num_rows, processor), processor.lanes
    weights, values = words(num_rows, 32), small_bytes(3, 8, 48, 2)  # [blocks, pairs of slots, dimensions, 2]
    scales, out = np.linspace(0.5, 2, num_rows, dtype=np.float32), np.full((num_rows, 48), np.nan, np.float32)

    @numba.njit
    def call(weights, table, values, scales, out):
        tile(weights, 32, table, 2, values + 32, 768, 8, 96, scales, out + 64, 48, apart)

    call(*(part.ctypes.data for part in (weights, TWO_BLOCKS, values, scales, out)))
    by_block = weights.reshape(num_rows, 2, 8, 2).astype(np.int64)
    expected = np.einsum("rbpi,bpdi->rd", by_block, values[TWO_BLOCKS]).astype(np.float32) * scales[:, None]
    computed = sorted({*range(16, 16 + lanes), *range(16 + apart, 16 + apart + lanes)})
    assert np.array_equal(out[:, computed], expected[:, computed])
    assert np.isnan(np.delete(out, computed, axis=1)).all()


def test_no_sum_of_products_leaves_32_bits():
    assert int8.is_supported(256, 512)
    assert 512 * 32767 * 128 < 2**31


@pytest.mark.parametrize(("block_size", "head_dim"), [(8, 64), (272, 64), (16, 72), (16, 528)])
def test_other_blocks_and_heads_are_not_supported(block_size, head_dim):
    """Tiles are whole, and sums stay below 32 bits."""
    assert not int8.is_supported(block_size, head_dim)


def weigh_on(processor):
    """Scores made weights in place, by this processor's instructions; not kept on disk, since nothing names them."""
    weigh_tile = int8_tiles.weigh_by(processor)

    @numba.njit
    def call(scores, largest, scales):
        return weigh_tile(address(scores), scores.size, largest, address(scales))

    return call


weigh = weigh_on(this_processor())


@PROCESSORS
def test_weights_and_their_sum_have_the_same_bits_on_any_processor(processor):
    generator = np.random.default_rng(3)
    scores, scales = (generator.standard_normal((2, 48)) * 5).astype(np.float32)
    largest = scores.max()
    found, expected = scores.copy(), scores.copy()
    assert weigh_on(processor)(found, largest, np.abs(scales)) == weigh(expected, largest, np.abs(scales))
    assert np.array_equal(found, expected)


def test_weights_are_exponentials_times_the_scales_of_their_slots():
    """Within half a millionth; what is hidden, or as good as zero, is zero even beside a scale that is no number."""
    scores = np.linspace(-20, 3, 64, dtype=np.float32)
    scores[5], scores[6] = -np.inf, -100
    scales = np.linspace(0.1, 1, 64, dtype=np.float32)
    scales[5:7] = np.nan
    weights = scores.copy()
    total, largest = weigh(weights, np.float32(3), scales)
    exponentials = np.where(scores < -84, 0, np.exp((scores - np.float32(3)).astype(np.float64)))
    expected = np.where(scores < -84, 0, exponentials * scales)
    assert np.allclose(weights, expected, rtol=5e-7, atol=0)
    assert total == pytest.approx(exponentials.sum(), rel=1e-6)
    assert largest == weights.max()


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFFFFFFF], ids=["NaN", "negative NaN"])
@pytest.mark.parametrize("part", ["scores", "scales"])
def test_one_number_that_is_none_shows(part, bits):
    arrays = {"scores": np.zeros(16, np.float32), "scales": np.ones(16, np.float32)}
    arrays[part][9] = np.array(bits, np.uint32).view(np.float32)
    assert np.isnan(weigh(arrays["scores"], np.float32(0), arrays["scales"])).any()


@PROCESSORS
def test_numbers_are_rounded_to_even_words(processor):
    round_tile = int8_tiles.round_to_words_by(processor)

    @numba.njit
    def call(x, factor, out):
        round_tile(address(x), x.size, factor, address(out))

    x = np.array([0.5, 1.5, -0.5, -2.5, 32767, -32767, 1e-9, 7.49] * 2, np.float32)
    out = np.zeros(16, np.int16)
    call(x, np.float32(1), out)
    assert out.tolist() == [0, 2, 0, -2, 32767, -32767, 0, 7] * 2

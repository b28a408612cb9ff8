"""quantized_linear: exact integers under float32 scales, the same bits for a row in any company, nothing saturates."""

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_rig.packed import random_packed_weight
from kernel_rig.processors import usable_processors
from paceline_kernels.compiler import jit
from paceline_kernels.errors import KernelArgumentError, UnsupportedDeviceError
from paceline_kernels.quantized_linear import (
    WeightFormat,
    pack_int4,
    pack_int8,
    packing,
    quantize,
    quantized_linear,
    reference,
    tiles,
    unpack_rows,
)
from paceline_kernels.quantized_linear.cpu import quantize_groups
from paceline_kernels.vector.simd import address

FORMATS = pytest.mark.parametrize("weight_format", list(WeightFormat), ids=lambda kind: kind.name)
SPANS = pytest.mark.parametrize("span", [1, 2, 4, packing.WHOLE_ROW])
# Rows around the tiles of 8, 4, 2 and 1.
NUM_ROWS = [*range(1, 12), 63, 100]
NUM_INPUTS = [32, 96, 576]


def rows(num_rows, num_inputs, seed=0):
    """Standard normal rows, each group of 32 of another size."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(num_rows, num_inputs // 32, 1, generator=generator) * 10 + 0.01
    return (torch.randn(num_rows, num_inputs // 32, 32, generator=generator) * sizes).flatten(1)


def rounding(x, weight):
    """How far a float32 sum over the groups may be off: an ulp per group, and three, of the sum of all magnitudes."""
    integers, scales = (part.double() for part in reference.quantize_activations(x))
    weights, weight_scales, minima = reference.unpack(weight)
    columns = (weights.abs() * weight_scales.abs()[:, :, None] + minima.abs()[:, :, None]).flatten(1)
    magnitudes = (integers.abs() * scales[:, :, None]).flatten(1) @ columns.T
    return magnitudes * 2.0**-23 * (weight.num_inputs // 32 + 3)


def assert_right(x, weight):
    """The reference's numbers, within the rounding of float32."""
    error = (quantized_linear(x, weight).double() - reference.quantized_linear(x, weight).double()).abs()
    assert (error <= rounding(x, weight)).all(), (error - rounding(x, weight)).max()


@FORMATS
@pytest.mark.parametrize(
    "num_outputs", [1, 16, 41, *(pytest.param(size, marks=pytest.mark.slow) for size in (15, 100))]
)
@pytest.mark.parametrize("num_inputs", NUM_INPUTS)
@SPANS
def test_quantized_linear_equals_the_reference(weight_format, num_outputs, num_inputs, span):
    """Outputs around the tiles of 16, and a last span that is shorter than the others."""
    weight = random_packed_weight(num_outputs, num_inputs, weight_format, 1, span)
    for num_rows in NUM_ROWS:
        assert_right(rows(num_rows, num_inputs, seed=num_rows), weight)


@FORMATS
@settings(max_examples=settings.default.max_examples // 4)
@given(
    num_rows=st.integers(1, 9),
    num_outputs=st.integers(1, 40),
    num_groups=st.integers(1, 5),
    span=st.sampled_from([1, 2, 4, 64]),
    seed=st.integers(0, 2**32 - 1),
    exponents=st.lists(st.integers(-28, 28), min_size=5, max_size=5),
)
def test_groups_of_any_size_are_as_precise_as_others(
    weight_format, num_rows, num_outputs, num_groups, span, seed, exponents
):
    """From 1e-28 to 1e28, side by side in one row."""
    weight = random_packed_weight(num_outputs, 32 * num_groups, weight_format, seed, span)
    sizes = torch.tensor([10.0**exponent for exponent in exponents[:num_groups]]).repeat_interleave(32)
    assert_right(rows(num_rows, 32 * num_groups, seed) * sizes, weight)


@FORMATS
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(41, 96), (100, 576)])
def test_a_row_has_the_same_bits_alone_and_at_any_place_of_any_batch(weight_format, num_outputs, num_inputs):
    x, weight = rows(100, num_inputs), random_packed_weight(num_outputs, num_inputs, weight_format, seed=1)
    alone = torch.cat([quantized_linear(row[None].clone(), weight) for row in x])
    for size in NUM_ROWS:
        for start in {0, 1, 100 - size}:
            part = slice(start, start + size)
            assert torch.equal(quantized_linear(x[part].clone(), weight), alone[part])


@FORMATS
def test_the_number_of_threads_does_not_change_a_bit(weight_format, threads):
    """Threads share tiles out, never a sum."""
    x, weight = rows(7, 96), random_packed_weight(100, 96, weight_format, seed=1)
    one = quantized_linear(x, weight)
    threads(2)
    assert torch.equal(quantized_linear(x, weight), one)


def uniform_weight(weight_format, integer, scale=1.0, minimum=0.0):
    """17 outputs of 64 inputs, all the same."""
    scales = np.full((17, 2), scale, np.float32)
    nibbles, second = np.full((17, 64), integer % 256, np.uint8), np.full((17, 2), minimum, np.float32)
    if weight_format is WeightFormat.INT4:
        return pack_int4(nibbles, scales, second)
    if weight_format is WeightFormat.INT4_ZEROS:
        return pack_int4(nibbles, scales, zeros=second)
    return pack_int8(np.full((17, 64), integer, np.int8), scales)


@pytest.mark.parametrize(
    ("weight_format", "integer"),
    [
        (WeightFormat.INT4, 15),
        (WeightFormat.INT4, 0),
        (WeightFormat.INT4_ZEROS, 15),
        (WeightFormat.INT8, 127),
        (WeightFormat.INT8, -127),
        (WeightFormat.INT8, -128),
    ],
)
@pytest.mark.parametrize("signs", [(1, 1), (-1, -1), (1, -1)])
def test_the_largest_integers_do_not_saturate(weight_format, integer, signs):
    """All weights and all inputs at their bound: the sums of pairs, and of groups, are exact."""
    x = torch.tensor(signs * 32, dtype=torch.float32).expand(5, 64) * 127
    expected = torch.full((5, 17), 32.0 * 127 * integer * sum(signs))
    assert torch.equal(quantized_linear(x.contiguous(), uniform_weight(weight_format, integer)), expected)


def test_a_minimum_is_added_once_for_every_input():
    x = torch.full((3, 64), 127.0)
    weight = uniform_weight(WeightFormat.INT4, integer=3, scale=2.0, minimum=-5.0)
    assert torch.equal(quantized_linear(x, weight), torch.full((3, 17), 64 * 127.0))


@FORMATS
def test_zeros_and_what_is_nearly_zero_give_zeros(weight_format):
    """Denormal inputs have no finite factor: they count as zeros, and so do negative zeros."""
    weight = random_packed_weight(17, 64, weight_format, seed=1)
    x = torch.tensor([0.0, -0.0, 1e-45, -1e-38, 9e-31])[:, None].expand(5, 64).contiguous()
    assert torch.equal(quantized_linear(x, weight), torch.zeros(5, 17))


@FORMATS
def test_denormals_beside_larger_numbers_round_to_zero(weight_format):
    """One of each group is 1: the others are nothing beside it."""
    weight = random_packed_weight(17, 64, weight_format, seed=1)
    x = torch.full((1, 64), 1e-45)
    x[:, ::32] = 1.0
    alone = torch.zeros(1, 64)
    alone[:, ::32] = 1.0
    assert torch.equal(quantized_linear(x, weight), quantized_linear(alone, weight))


@FORMATS
@pytest.mark.parametrize("spoilt", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 31, 70])
def test_what_is_not_finite_spoils_its_row_and_no_other(weight_format, spoilt, place):
    x, weight = rows(7, 96), random_packed_weight(41, 96, weight_format, seed=1)
    clean = quantized_linear(x, weight)
    x[2, place] = spoilt
    found = quantized_linear(x, weight)
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 1, 3, 4, 5, 6]], clean[[0, 1, 3, 4, 5, 6]])


@FORMATS
def test_no_tokens_give_no_rows(weight_format):
    assert quantized_linear(torch.zeros(0, 64), uniform_weight(weight_format, 1)).shape == (0, 17)


def calling(tile):
    """The tile as a compiled function of its own; not kept on disk, since it differs by nothing that has a name."""

    @numba.njit
    def call(x, x_stride, scales, sums, row_stride, w, w_stride, num_groups, out, out_stride, span):
        tile(x, x_stride, scales, sums, row_stride, w, w_stride, num_groups, out, out_stride, span)

    return call


@jit.compiled_for_python
def quantize_rows(x, num_groups, integers, scales, sums):
    """Rows made int8, group by group."""
    for row in range(x.shape[0]):
        out = (address(integers[row]), address(scales[row]), address(sums[row]))
        quantize_groups(address(x[row]), num_groups, *out)


def multiply_by_tile(call, x, weight):
    """The first tile of outputs of all rows of x, by one call of this operation."""
    num_rows, num_groups = x.shape[0], x.shape[1] // 32
    integers = np.empty(x.shape, np.int8)
    scales, sums, out = (np.full((num_rows, width), np.nan, np.float32) for width in (num_groups, num_groups, 16))
    quantize_rows(x.numpy(), num_groups, integers, scales, sums)
    quantised = (integers.ctypes.data, x.shape[1], scales.ctypes.data, sums.ctypes.data, num_groups)
    matrix = (weight.data.data_ptr(), weight.data.shape[1], num_groups)
    call(*quantised, *matrix, out.ctypes.data, 16, weight.span.bit_length() - 1)
    return torch.from_numpy(out)


@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize("processor", usable_processors(), ids=lambda processor: processor.name)
@FORMATS
def test_all_processors_compute_the_same_bits(weight_format, processor, num_rows):
    tile = calling(tiles.dot_tile(num_rows, 1, weight_format, processor))
    largest = uniform_weight(weight_format, -128 if weight_format is WeightFormat.INT8 else 15, scale=0.37)
    random = (random_packed_weight(*shape, weight_format, 1, span) for shape in ((16, 64), (41, 64)) for span in (1, 2))
    for weight in (*random, largest):
        for x in (rows(num_rows, 64), torch.full((num_rows, 64), -127.0)):
            assert torch.equal(multiply_by_tile(tile, x, weight), quantized_linear(x, weight)[:, :16])


@st.composite
def int4_parts(draw):
    """Integers 0 to 15, scales and minima that float16 holds, in any shape."""
    num_outputs, num_groups = draw(st.integers(1, 40)), draw(st.integers(1, 4))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    integers = generator.integers(0, 16, (num_outputs, 32 * num_groups), np.uint8)
    scales, minima = generator.standard_normal((2, num_outputs, num_groups)).astype(np.float16).astype(np.float32)
    return integers, scales, minima


def spread(values, integers, span=1):
    """To all inputs of a span, in float64."""
    return np.repeat(values.astype(np.float64), 32 * span, axis=1)[:, : integers.shape[1]]


def exact(integers, scales, minima=None, span=1):
    """scale * integer + minimum, computed in float64, as float32."""
    wide = integers.astype(np.float64) * spread(scales, integers, span)
    return (wide if minima is None else wide + spread(minima, integers, span)).astype(np.float32)


def unpack_all(weight):
    """The whole matrix, its rows in reverse and back, so that order matters."""
    backwards = torch.arange(weight.num_outputs - 1, -1, -1, dtype=torch.int32)
    return unpack_rows(weight, backwards).numpy()[::-1]


@given(int4_parts())
def test_what_was_packed_as_int4_is_unpacked_exactly(parts):
    assert np.array_equal(unpack_all(pack_int4(*parts)), exact(*parts))


@given(int4_parts(), st.sampled_from([1, 2, 4, packing.WHOLE_ROW]), st.integers(0, 2**32 - 1))
def test_what_was_packed_with_zero_points_is_unpacked_exactly(parts, span, seed):
    integers = parts[0]
    spans = (integers.shape[0], -(-integers.shape[1] // (32 * span)))
    generator = np.random.default_rng(seed)
    scales, zeros = generator.standard_normal(spans).astype(np.float16), generator.integers(0, 16, spans)
    packed = pack_int4(integers, scales.astype(np.float32), zeros=zeros.astype(np.float32), span=span)
    span = min(span, 64)
    below = integers.astype(np.float64) - spread(zeros, integers, span)
    assert np.array_equal(unpack_all(packed), (below * spread(scales, integers, span)).astype(np.float32))


@given(int4_parts(), st.integers(0, 2**32 - 1))
def test_what_was_packed_as_int8_is_unpacked_exactly(parts, seed):
    """The same for all 256 integers."""
    shape, scales = parts[0].shape, parts[1]
    integers = np.random.default_rng(seed).integers(-128, 128, shape).astype(np.int8)
    assert np.array_equal(unpack_all(pack_int8(integers, scales)), exact(integers, scales))


@given(int4_parts())
def test_the_reference_reads_the_layout_on_its_own(parts):
    integers, scales, minima = reference.unpack(pack_int4(*parts))
    assert np.array_equal(integers.flatten(1).numpy(), parts[0])
    assert np.array_equal(scales.numpy(), parts[1])
    assert np.array_equal(minima.numpy(), parts[2])


def test_a_row_may_be_unpacked_twice_and_none_may():
    weight = random_packed_weight(5, 32, WeightFormat.INT4, seed=1)
    twice = unpack_rows(weight, torch.tensor([3, 3], dtype=torch.int32))
    assert torch.equal(twice[0], twice[1])
    assert unpack_rows(weight, torch.zeros(0, dtype=torch.int32)).shape == (0, 32)


@given(st.integers(0, 2**32 - 1), st.integers(-6, 6))
def test_quantised_weights_are_off_by_at_most_half_a_scale(seed, exponent):
    """And the scale is the largest weight's 127th part, rounded up to a float16 or to 2**-24."""
    weight = np.random.default_rng(seed).standard_normal((5, 64), np.float32) * np.float32(10.0**exponent)
    integers, scales = quantize(weight)
    wanted = np.abs(weight).reshape(5, 2, 32).max(axis=2) / np.float32(127)
    kept = scales > 0
    assert (np.abs(integers.astype(np.int64)) <= 127).all()
    assert (scales == scales.astype(np.float16)).all()
    assert (kept == (wanted >= 2.0**-24)).all()
    assert (scales[kept] >= wanted[kept]).all()
    assert (scales[kept] <= wanted[kept] * (1 + 2.0**-10) + 2.0**-24).all()
    error = np.abs(exact(integers, scales) - weight).reshape(5, 2, 32).max(axis=2)
    assert (error[kept] <= scales[kept] * 0.500001).all()


def test_quantised_zeros_are_zeros():
    integers, scales = quantize(np.zeros((3, 64), np.float32))
    assert not integers.any()
    assert not scales.any()


@pytest.mark.parametrize(
    ("x", "problem"),
    [
        (torch.zeros(2, 32), r"x must have shape \[any, 64\]"),
        (torch.zeros(64), "x must have shape"),
        (torch.zeros(2, 64, dtype=torch.float64), "x must be torch.float32"),
        (torch.zeros(64, 2).T, "x must be contiguous"),
    ],
)
def test_inputs_that_do_not_fit_the_weight_are_refused(x, problem):
    """Compiled code never sees them."""
    with pytest.raises(KernelArgumentError, match=problem):
        quantized_linear(x, uniform_weight(WeightFormat.INT4, 1))


@pytest.mark.parametrize(
    ("indices", "problem"),
    [
        (torch.zeros(2, dtype=torch.int64), "indices must be torch.int32"),
        (torch.zeros(2, 2, dtype=torch.int32), "indices must have shape"),
        (torch.zeros(4, dtype=torch.int32)[::2], "indices must be contiguous"),
    ],
)
def test_indices_of_another_kind_are_refused(indices, problem):
    with pytest.raises(KernelArgumentError, match=problem):
        unpack_rows(uniform_weight(WeightFormat.INT8, 1), indices)


@pytest.mark.parametrize("index", [-1, 17, 2**30])
def test_rows_that_do_not_exist_are_refused(index):
    weight = uniform_weight(WeightFormat.INT8, 1)
    with pytest.raises(KernelArgumentError, match="indices must be 0 to"):
        unpack_rows(weight, torch.tensor([index], dtype=torch.int32))


def test_minima_that_do_not_fit_their_scales_are_refused():
    integers, scales = np.zeros((16, 32), dtype=np.uint8), np.ones((16, 1), dtype=np.float32)
    with pytest.raises(KernelArgumentError, match="minima do not fit"):
        pack_int4(integers, scales, scales[:15])


@pytest.mark.parametrize("outputs_and_inputs", [(3, 33), (3, 16), (4, 32)])
def test_weights_that_do_not_fit_their_scales_are_refused(outputs_and_inputs):
    """A group is 32 inputs, and each has a scale."""
    scales = np.ones((3, 1), np.float32)
    with pytest.raises(KernelArgumentError, match="do not fit"):
        pack_int8(np.zeros(outputs_and_inputs, np.int8), scales)
    with pytest.raises(KernelArgumentError, match="do not fit"):
        pack_int4(np.zeros(outputs_and_inputs, np.uint8), scales, scales)


@pytest.mark.parametrize("scale", [65520.0, -1e30, np.inf, np.nan])
def test_scales_that_float16_does_not_hold_are_refused(scale):
    """65,504 is its largest number."""
    good, bad = np.ones((3, 1), np.float32), np.full((3, 1), scale, np.float32)
    with pytest.raises(KernelArgumentError, match="not a finite float16"):
        pack_int8(np.zeros((3, 32), np.int8), bad)
    for parts in ((bad, good), (good, bad)):
        with pytest.raises(KernelArgumentError, match="not a finite float16"):
            pack_int4(np.zeros((3, 32), np.uint8), *parts)


@pytest.mark.parametrize("value", [1e7, np.inf, np.nan])
def test_floats_too_large_for_any_scale_are_refused(value):
    """127 times 65,504 is the end."""
    with pytest.raises(KernelArgumentError, match="not a finite float16"):
        quantize(np.full((1, 32), value, np.float32))


def test_a_device_without_an_implementation_is_named():
    weight = uniform_weight(WeightFormat.INT4, 1)
    with pytest.raises(UnsupportedDeviceError, match="quantized_linear has no implementation for device 'meta'"):
        quantized_linear(torch.zeros(1, 64, device="meta"), weight)
    with pytest.raises(UnsupportedDeviceError, match="unpack_rows has no implementation for device 'meta'"):
        unpack_rows(weight, torch.zeros(1, dtype=torch.int32, device="meta"))

"""Matrix products on a GPU: right against float64 at odd sizes and for all weights, within bounds, and invariant."""

import pytest
import torch

from paceline_kernels.errors import KernelArgumentError, UnsupportedDeviceError
from paceline_kernels.gpu import architecture
from paceline_kernels.gpu.architecture import Architecture
from paceline_kernels.linear import Splits
from paceline_kernels.linear import reference as linear_reference
from paceline_kernels.linear import triton as linear
from paceline_kernels.linear.triton import tiles
from paceline_kernels.linear.triton.launches import Product, product_of_16_bits
from paceline_kernels.scaled_linear import ScaledWeight, quantize_rows, scaled_linear
from paceline_kernels.scaled_linear import reference as scaled_reference
from paceline_kernels.scaled_linear import triton as scaled
from paceline_kernels.testing.tensors import normal, placed

# (tokens, out, in): around the sizes of tiles and of steps.
SHAPES = [(1, 63, 100), (3, 1, 1), (8, 129, 129), (12, 70, 600), (17, 100, 1025)]
# Of results of about 1, by the type of x: half a unit in the last place, with a little for float32's own sums.
ROUNDING = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 5e-6}


def problem(shape, dtype):
    """(x, weight of unit gain, bias)."""
    num_tokens, num_out, num_in = shape
    x, weight = normal(num_tokens, num_in), normal(num_out, num_in, seed=1) / num_in**0.5
    return x.to(dtype), weight.to(dtype), normal(num_out, seed=2).to(dtype)


def scaled_problem(shape, dtype, weight_type):
    """(x, weight of 8 bits, bias)."""
    x, weight, bias = problem(shape, torch.float32)
    return x.to(dtype), quantize_rows(weight, weight_type), bias.to(dtype)


def assert_close(ours, expected, bound=None):
    """Equal but for the rounding of our type."""
    bound = bound or ROUNDING[ours.dtype]
    torch.testing.assert_close(ours.cpu().float(), expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("splits", Splits)
def test_linear_equals_the_reference(place, dtype, shape, splits):
    x, weight, bias = problem(shape, dtype)
    ours = place(x), place(weight)
    assert_close(linear.linear(*ours, place(bias), splits), linear_reference.linear(x, weight, bias))
    assert_close(linear.linear(*ours, None, splits), linear_reference.linear(x, weight))


@pytest.mark.parametrize("weight_type", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", SHAPES[2:], ids=str)
@pytest.mark.parametrize("splits", Splits)
def test_scaled_linear_equals_the_reference(place, dtype, shape, splits, weight_type):
    """With stored numbers as they are: what rounding the weights cost is no part of it."""
    x, weight, bias = scaled_problem(shape, dtype, weight_type)
    expected = scaled_reference.scaled_linear(x, weight, bias)
    assert_close(scaled.scaled_linear(place(x), placed(place, weight), place(bias), splits), expected)


@pytest.mark.parametrize(
    ("architecture", "num_tokens", "num_weights", "product"),
    [
        (Architecture.SM_90, 8, 28_672 * 4096, Product.FEW_ROWS),
        (Architecture.SM_90, 8, 128_256 * 4096, Product.LIBRARY),
        (Architecture.SM_90, 9, 4096 * 4096, Product.TILES),
        (Architecture.SM_90, 16, 28_672 * 4096, Product.LIBRARY),
        (Architecture.SM_90, 17, 4096 * 4096, Product.LIBRARY),
        (Architecture.SM_80, 16, 4096 * 4096, Product.FEW_ROWS),
        (Architecture.SM_80, 1, 28_672 * 4096, Product.LIBRARY),
        (Architecture.SM_80, 17, 4096 * 4096, Product.LIBRARY),
    ],
)
def test_the_product_of_16_bits_is_the_one_that_was_fastest(architecture, num_tokens, num_weights, product):
    assert product_of_16_bits(architecture, num_tokens, num_weights) is product


def test_many_rows_of_int8_are_tiles(place, monkeypatch):
    monkeypatch.setattr(tiles, "OUTPUT_TILES_TOGETHER", 1)
    x, weight, _ = scaled_problem((130, 65, 40), torch.float16, torch.int8)
    ours = scaled.scaled_linear(place(x), placed(place, weight), None, Splits.EVEN)
    assert_close(ours, scaled_reference.scaled_linear(x, weight))


def float8_rows(num_tokens, num_in):
    """(numbers that float8_e4m3fn has, a power of two for each row): others the interpreter rounds wrongly."""
    numbers = (100 * normal(num_tokens, num_in)).clamp(-400, 400)
    numbers[:, 0] = 448.0
    return numbers.to(torch.float8_e4m3fn).float(), torch.exp2(torch.arange(num_tokens) - num_tokens // 2)[:, None]


def test_many_rows_of_float8_are_rounded_each_under_its_own_scale(place):
    """No row takes the precision of others, whose numbers are larger by up to 2 ** 69."""
    _, weight, _ = scaled_problem((70, 32, 48), torch.bfloat16, torch.float8_e4m3fn)
    numbers, scales = float8_rows(70, 48)
    x = (numbers * scales).bfloat16()
    expected = scaled_reference.scaled_linear(x, weight) / scales
    ours = scaled.scaled_linear(place(x), placed(place, weight), None, Splits.EVEN).cpu().float() / scales
    torch.testing.assert_close(ours, expected, rtol=8e-3, atol=0.5)


def test_rows_are_rounded_to_the_whole_range_of_float8(place):
    """The largest number becomes 448 under a scale that is kept; a row of zeros has the scale 1."""
    numbers, scales = float8_rows(3, 5000)
    numbers[1], scales[1] = 0.0, 1.0
    rounded, kept = scaled.round_rows(place((numbers * scales).half()))
    assert torch.equal(rounded.cpu().float(), numbers)
    assert torch.equal(kept.cpu(), scales)


@pytest.mark.usefixtures("_products_by_row")
@pytest.mark.parametrize("weight_type", [torch.int8, None], ids=str)
def test_with_fixed_splits_a_row_has_the_same_bits_in_any_batch(place, weight_type):
    x, weight, bias = problem((140, 20, 300), torch.float16)
    batches = [place(x[start:]) for start in (139, 100, 0)]
    if weight_type is None:
        ours = place(weight), place(bias), Splits.FIXED
        outs = [linear.linear(batch, *ours) for batch in batches]
    else:
        ours = placed(place, quantize_rows(weight, weight_type)), place(bias), Splits.FIXED
        outs = [scaled.scaled_linear(batch, *ours) for batch in batches]
    for out in outs:
        assert torch.equal(out[-1], outs[0][-1])


@pytest.mark.parametrize("splits", Splits)
def test_a_row_does_not_feel_what_its_neighbours_hold(place, dtype, splits):
    x, weight, _ = problem((5, 20, 70), dtype)
    ours = place(weight)
    clean = linear.linear(place(x), ours, None, splits)
    x[1], x[3] = float("nan"), float("inf")
    assert torch.equal(linear.linear(place(x), ours, None, splits)[[0, 2, 4]], clean[[0, 2, 4]])


def test_nothing_to_multiply_launches_nothing(place):
    none, x, rows = (place(torch.zeros(*shape).half()) for shape in ((0, 8), (2, 0), (3, 8)))
    without_inputs, bias = place(torch.zeros(3, 0).half()), place(torch.ones(3).half())
    weight = placed(place, quantize_rows(torch.zeros(3, 8), torch.int8))
    for splits in Splits:
        assert linear.linear(none, rows, None, splits).shape == (0, 3)
        assert scaled.scaled_linear(none, weight, None, splits).shape == (0, 3)
        assert linear.linear(x, without_inputs, bias, splits).tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize(("dtype", "worst"), [(torch.int8, 0.5 / 127), (torch.float8_e4m3fn, 2.0**-4)])
def test_rows_are_quantised_under_their_largest_number(dtype, worst):
    weight = normal(5, 100) * torch.logspace(-5, 5, 5)[:, None]
    weight[2] = 0.0
    made = quantize_rows(weight.bfloat16(), dtype)
    error = (made.values.float() * made.scales[:, None] - weight.bfloat16().float()).abs()
    assert (error <= worst * weight.abs().amax(dim=1, keepdim=True) * 1.01).all()
    assert made.scales[2] == 1.0
    with pytest.raises(KernelArgumentError, match=r"quantize_rows: .* cannot become torch.uint8"):
        quantize_rows(weight, torch.uint8)


def test_float8_weights_are_refused_where_a_gpu_has_no_such_numbers(place, monkeypatch):
    """An A100, say."""
    monkeypatch.setattr(architecture, "_current_capability", lambda: 80)
    x, weight, _ = scaled_problem((1, 2, 3), torch.float16, torch.float8_e4m3fn)
    with pytest.raises(KernelArgumentError, match="use int8"):
        scaled.scaled_linear(place(x), placed(place, weight), None, Splits.EVEN)


def test_a_cpu_is_told_that_there_is_nothing_for_it():
    weight = quantize_rows(torch.ones(2, 3), torch.int8)
    with pytest.raises(UnsupportedDeviceError, match="scaled_linear has no implementation for device 'cpu'"):
        scaled_linear(torch.zeros(1, 3), weight)


@pytest.mark.parametrize(
    ("x", "values", "scales", "wrong"),
    [
        (torch.zeros(2, 4), torch.zeros(3, 4, dtype=torch.int8), torch.ones(3), "x must be torch.bfloat16 or"),
        (torch.zeros(2, 5).half(), torch.zeros(3, 4, dtype=torch.int8), torch.ones(3), "x must have shape"),
        (torch.zeros(2, 4).half(), torch.zeros(3, 4), torch.ones(3), "values must be torch.float8_e4m3fn or"),
        (torch.zeros(2, 4).half(), torch.zeros(3, 4, dtype=torch.int8), torch.ones(1, 1), "scales must have shape"),
    ],
)
def test_what_the_docstring_rules_out_is_refused(x, values, scales, wrong, monkeypatch):
    """Scales of blocks, for one."""
    monkeypatch.setattr("paceline_kernels.gpu.has_kernels", lambda device: True)
    meta = [tensor.to("meta") for tensor in (x, values, scales)]
    with pytest.raises(KernelArgumentError, match=wrong):
        scaled_linear(meta[0], ScaledWeight(*meta[1:]))

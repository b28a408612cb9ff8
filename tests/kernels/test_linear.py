"""linear and scaled_linear: right against float64 at odd sizes, the same bits for a row whatever stands around it."""

import numpy as np
import pytest
import torch

from kernel_rig.tensors import normal, placed
from paceline_kernels.errors import KernelArgumentError, UnsupportedDeviceError
from paceline_kernels.gpu import architecture
from paceline_kernels.gpu.architecture import Architecture
from paceline_kernels.linear import Splits, linear, sum_of_slices, unrounded_linear
from paceline_kernels.linear import reference as linear_reference
from paceline_kernels.scaled_linear import RoundedRows, ScaledWeight, quantize_rows, rounded_type, scaled_linear
from paceline_kernels.scaled_linear import reference as scaled_reference

slow = pytest.mark.slow
# (tokens, out, in): around the sizes of tiles, vectors, steps and row blocks. Of few rows, tiles and the library, and
# of one, two and three rows beside each other on a CPU, each is there once in what is not slow.
SHAPES = [
    pytest.param((1, 1, 1), marks=slow),
    (1, 3, 8),
    pytest.param((1, 63, 100), marks=slow),
    (2, 5, 7),
    pytest.param((3, 1, 1), marks=slow),
    (3, 4, 9),
    pytest.param((4, 6, 64), marks=slow),
    pytest.param((5, 7, 63), marks=slow),
    pytest.param((8, 129, 129), marks=slow),
    (12, 70, 600),
    (17, 100, 100),
    pytest.param((17, 100, 1025), marks=slow),
    pytest.param((130, 31, 1000), marks=slow),
]
SCALED_SHAPES = [(8, 70, 129), pytest.param((12, 70, 600), marks=slow), pytest.param((17, 100, 1025), marks=slow)]
SPLITS = pytest.mark.parametrize("splits", Splits)
INT8, FLOAT8 = torch.int8, torch.float8_e4m3fn
# Of results of about 1, by the type of x: half a unit in the last place, with a little for float32's own sums.
ROUNDING = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 2e-6}


def problem(shape, dtype):
    """(x, weight of unit gain, bias)."""
    num_tokens, num_out, num_in = shape
    x, weight = normal(num_tokens, num_in), normal(num_out, num_in, seed=1) / num_in**0.5
    return x.to(dtype), weight.to(dtype), normal(num_out, seed=2).to(dtype)


def scaled_problem(shape, dtype, weight_type):
    """(x, weight of 8 bits, bias)."""
    x, weight, bias = problem(shape, torch.float32)
    return x.to(dtype), quantize_rows(weight, weight_type), bias.to(dtype)


def assert_close(ours, expected):
    """Equal but for the rounding of our type."""
    bound = ROUNDING[ours.dtype]
    torch.testing.assert_close(ours.cpu().float(), expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@SPLITS
def test_linear_equals_the_reference(place, dtype, shape, splits):
    x, weight, bias = problem(shape, dtype)
    ours = place(x), place(weight)
    assert_close(linear(*ours, splits=splits), linear_reference.linear(x, weight))
    assert_close(linear(*ours, place(bias), splits=splits), linear_reference.linear(x, weight, bias))


@pytest.mark.parametrize("weight_type", [INT8, FLOAT8], ids=str)
@pytest.mark.parametrize("shape", SCALED_SHAPES, ids=str)
@SPLITS
def test_scaled_linear_equals_the_reference(gpu, place, dtype, shape, splits, weight_type):
    """With stored numbers as they are: what rounding the weights cost is no part of it."""
    x, weight, bias = scaled_problem(shape, dtype, weight_type)
    expected = scaled_reference.scaled_linear(x, weight, bias)
    assert_close(scaled_linear(place(x), placed(place, weight), place(bias), splits=splits), expected)


@pytest.mark.parametrize(
    ("architecture", "num_tokens", "num_weights", "product"),
    [
        (Architecture.SM_90, 8, 28_672 * 4096, "FEW_ROWS"),
        (Architecture.SM_90, 8, 128_256 * 4096, "LIBRARY"),
        (Architecture.SM_90, 9, 4096 * 4096, "TILES"),
        (Architecture.SM_90, 16, 28_672 * 4096, "LIBRARY"),
        (Architecture.SM_90, 17, 4096 * 4096, "LIBRARY"),
        (Architecture.SM_80, 16, 4096 * 4096, "FEW_ROWS"),
        (Architecture.SM_80, 1, 28_672 * 4096, "LIBRARY"),
        (Architecture.SM_80, 17, 4096 * 4096, "LIBRARY"),
    ],
)
def test_the_product_of_16_bits_is_the_one_that_was_fastest(architecture, num_tokens, num_weights, product):
    launches = pytest.importorskip("paceline_kernels.linear.triton.launches")
    assert launches.product_of_16_bits(architecture, num_tokens, num_weights) is launches.Product[product]


def rounded_to_int8(x):
    """(whole numbers, scale of each row) as float64: the largest becomes 127, ties in float32 go to the even number."""
    largest = x.float().abs().amax(dim=1, keepdim=True)
    return (x.float() * (127 / largest)).round().double(), largest.double() / 127


@pytest.mark.parametrize("shape", [(130, 65, 40), (65, 3, 257), pytest.param((70, 129, 1), marks=slow)], ids=str)
@pytest.mark.parametrize("adds", [True, False])
def test_many_rows_by_int8_are_rounded_to_int8_and_summed_exactly(gpu, place, dtype, monkeypatch, shape, adds):
    """Each row under its own scale: they differ by up to 2 ** 20."""
    monkeypatch.setattr("paceline_kernels.linear.triton.tiles.OUTPUT_TILES_TOGETHER", 1)
    x, weight, bias = scaled_problem(shape, torch.float32, INT8)
    x = (x * torch.exp2(torch.arange(len(x)) % 20 - 10.0)[:, None]).to(dtype)
    numbers, scales = rounded_to_int8(x)
    expected = (numbers @ weight.values.double().T) * scales * weight.scales.double()
    bias = bias.to(dtype) if adds else None
    ours = scaled_linear(place(x), placed(place, weight), None if bias is None else place(bias))
    assert_close(ours, (expected if bias is None else expected + bias.double()).float())


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf"), -float("inf")])
def test_a_rounded_row_shows_what_is_not_finite_and_its_neighbours_do_not(gpu, place, exact, spoilt):
    x, weight, _ = scaled_problem((70, 5, 40), exact, INT8)
    clean = scaled_linear(place(x), placed(place, weight)).cpu()
    x[3, 17] = spoilt
    found = scaled_linear(place(x), placed(place, weight)).cpu()
    assert not found[3].isfinite().any()
    others = [row for row in range(70) if row != 3]
    assert torch.equal(found[others], clean[others])


@pytest.mark.parametrize(
    ("num_tokens", "x_type", "weight_type", "shape", "splits", "expected"),
    [
        (65, torch.float16, INT8, (3, 5), Splits.EVEN, INT8),
        (65, torch.float16, INT8, (3, 5), Splits.FIXED, None),
        (64, torch.float16, INT8, (3, 5), Splits.EVEN, None),
        (65, torch.float16, INT8, (1, (1 << 17) + 1), Splits.EVEN, None),  # more than sums of 32 bits hold
        (65, torch.bfloat16, FLOAT8, (16, 32), Splits.EVEN, FLOAT8),
        (65, torch.bfloat16, FLOAT8, (16, 40), Splits.EVEN, None),
        (65, torch.float16, FLOAT8, (16, 32), Splits.EVEN, None),
        (65, torch.bfloat16, FLOAT8, (16, 0), Splits.EVEN, None),
    ],
)
def test_rows_are_rounded_where_there_are_instructions_for_them(
    monkeypatch, num_tokens, x_type, weight_type, shape, splits, expected
):
    pytest.importorskip("triton")
    monkeypatch.setattr(architecture, "_current_capability", lambda: 90)
    weight = ScaledWeight(torch.zeros(shape).to(weight_type), torch.ones(shape[0]))
    assert rounded_type(num_tokens, x_type, weight, splits) is expected


def test_rounded_rows_are_refused_where_the_product_takes_none(gpu, place, exact):
    """Few rows, numbers of another type, scales that are missing."""
    weight = placed(place, quantize_rows(normal(3, 8), INT8))

    def rows(num_tokens, kind=INT8, num_scales=70):
        return RoundedRows(place(torch.zeros(num_tokens, 8).to(kind)), place(torch.ones(num_scales, 1)), exact)

    assert scaled_linear(rows(70), weight).shape == (70, 3)
    for given, wrong in (
        (rows(8), "takes none that are rounded"),
        (rows(70, FLOAT8), "numbers must be torch.int8"),
        (rows(70, num_scales=69), "scales of rows must have shape"),
    ):
        with pytest.raises(KernelArgumentError, match=wrong):
            scaled_linear(given, weight)


def float8_rows(num_tokens, num_in):
    """(numbers that float8_e4m3fn has, a power of two for each row): others the interpreter rounds wrongly."""
    numbers = (100 * normal(num_tokens, num_in)).clamp(-400, 400)
    numbers[:, 0] = 448.0
    return numbers.to(FLOAT8).float(), torch.exp2(torch.arange(num_tokens) - num_tokens // 2)[:, None]


def test_many_rows_of_float8_are_rounded_each_under_its_own_scale(gpu, place):
    """No row takes the precision of others, whose numbers are larger by up to 2 ** 69."""
    from paceline_kernels.scaled_linear import triton as kernels

    _, weight, _ = scaled_problem((70, 32, 48), torch.bfloat16, FLOAT8)
    numbers, scales = float8_rows(70, 48)
    x = (numbers * scales).bfloat16()
    expected = scaled_reference.scaled_linear(x, weight) / scales
    # Not by `scaled_linear`, which takes no bfloat16 where a CPU stands for a GPU.
    ours = kernels.scaled_linear(place(x), placed(place, weight), None, Splits.EVEN).cpu().float() / scales
    torch.testing.assert_close(ours, expected, rtol=8e-3, atol=0.5)


def test_rows_are_rounded_to_the_whole_range_of_float8(gpu, place):
    """The largest number becomes 448 under a scale that is kept; a row of zeros has the scale 1."""
    from paceline_kernels.scaled_linear import triton as kernels

    numbers, scales = float8_rows(3, 5000)
    numbers[1], scales[1] = 0.0, 1.0
    rows = kernels.round_rows(place((numbers * scales).half()), FLOAT8)
    assert torch.equal(rows.numbers.cpu().float(), numbers)
    assert torch.equal(rows.scales.cpu(), scales)


def test_rows_are_rounded_to_the_whole_range_of_int8(gpu, place):
    """The largest becomes 127 or -127, ties go to the even number; a row of zeros has the scale 1."""
    from paceline_kernels.scaled_linear import triton as kernels

    numbers = normal(3, 5000, seed=3).mul(40).clamp(-127, 127)
    numbers[0, :5], numbers[1], numbers[2, 4999] = torch.tensor([-127.0, 0.5, 1.5, -2.5, 126.5]), 0.0, 127.0
    rows = kernels.round_rows(place(numbers.half() / 8), INT8)
    assert torch.equal(rows.numbers.cpu().float(), numbers.half().float().round())
    torch.testing.assert_close(rows.scales.cpu().flatten(), torch.tensor([0.125, 1.0, 0.125]), rtol=1e-6, atol=0)


@pytest.mark.usefixtures("_products_by_row")
@pytest.mark.parametrize("weight_type", [None, INT8], ids=str)
def test_with_fixed_splits_a_row_has_the_same_bits_in_any_batch(gpu, place, weight_type):
    x, weight, bias = problem((140, 20, 300), torch.float16)
    product, ours = (linear, place(weight))
    if weight_type is not None:
        product, ours = scaled_linear, placed(place, quantize_rows(weight, weight_type))
    outs = [product(place(x[start:]), ours, place(bias), splits=Splits.FIXED) for start in (139, 100, 0)]
    for out in outs:
        assert torch.equal(out[-1], outs[0][-1])


@pytest.mark.parametrize(
    ("num_out", "num_in", "slices"), [(96, 576, 1), (57, 100, 1), (64, 1536, 1), (96, 576, 3), (57, 1000, 8)]
)
def test_on_a_cpu_a_row_has_the_same_bits_alone_and_at_any_place_of_any_batch(threads, num_out, num_in, slices):
    x, weight, bias = problem((150, num_out, num_in), torch.float32)
    alone = torch.cat([linear(x[i : i + 1], weight, slices=slices) for i in range(150)])
    for size in (2, 3, 4, 5, 7, 8, 16, 31, 33, 84, 85, 150):
        for start in {0, 1, 150 - size}:
            rows = slice(start, start + size)
            assert torch.equal(linear(x[rows].clone(), weight, slices=slices), alone[rows])
    assert torch.equal(linear(x, weight, bias, slices=slices), alone + bias), "the bias is added after the product"


def halves_sum(partials):
    """The tree told from its top: the left half is the largest power of two that leaves something for the right one."""
    if len(partials) == 1:
        return partials[0]
    left = 2 ** ((len(partials) - 1).bit_length() - 1)
    return halves_sum(partials[:left]) + halves_sum(partials[left:])


def slice_product(x, weight):
    """Of numbers whose products float32 has: eight lanes, which are then added, and one by one what is beyond them."""
    lanes, full = np.zeros((8, len(x), len(weight)), np.float32), x.shape[1] // 8 * 8
    for i in range(full):
        lanes[i % 8] += np.outer(x[:, i], weight[:, i])
    total = ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]))
    for i in range(full, x.shape[1]):
        total += np.outer(x[:, i], weight[:, i])
    return total


@pytest.mark.parametrize("slices", [1, 2, 3, 4, 5, 7, 8])
def test_the_order_of_a_sum_in_slices_is_the_one_that_is_written_down(threads, slices):
    """Bit for bit, for tiles of one to three rows and one or four columns."""
    x, weight, bias = problem((5, 9, 29 * slices), torch.float32)
    x, weight = x.half().float(), weight.half().float()
    cuts = [np.split(each.numpy(), slices, axis=1) for each in (x, weight)]
    partials = [slice_product(*parts) for parts in zip(*cuts, strict=True)]
    expected = halves_sum(partials)
    assert np.array_equal(linear(x, weight, slices=slices).numpy(), expected)
    assert np.array_equal(sum_of_slices(torch.from_numpy(np.stack(partials))).numpy(), expected)
    assert_close(linear(x, weight, bias, slices=slices), linear_reference.linear(x, weight, bias))


@pytest.mark.parametrize("slices", [1, 2, 3, 4, 8])
def test_equal_parts_of_the_slices_summed_apart_give_the_bits_of_all_at_once(threads, slices):
    """However many parts, in shapes at random."""
    chance = np.random.default_rng(slices)
    for num_tokens in (1, 2, 300, *chance.integers(3, 300, 3)):
        num_out, length = chance.integers(1, 70), chance.integers(1, 90)
        x, weight, _ = problem((num_tokens, num_out, slices * length), torch.float32)
        whole = linear(x, weight, slices=slices)
        for num_parts in (count for count in range(1, slices + 1) if slices % count == 0):
            parts = zip(*(each.chunk(num_parts, dim=1) for each in (x, weight)), strict=True)
            sums = [linear(*map(torch.Tensor.contiguous, part), slices=slices // num_parts) for part in parts]
            assert torch.equal(sum_of_slices(torch.stack(sums)), whole)


@pytest.mark.parametrize("slices", [1, 2, 3, pytest.param(5, marks=slow), 7, 8])
def test_on_a_gpu_fixed_sums_in_slices_are_the_tree_of_each_slices_sum(gpu, place, exact, slices):
    """Bit for bit, so that equal parts summed apart give the bits of all at once, rounded once, after the bias."""
    problems = problem((5, 9, 20 * slices), exact)
    parts = zip(*(each.chunk(slices, dim=1) for each in problems[:2]), strict=True)
    partials = [unrounded_linear(*(place(each.contiguous()) for each in part)) for part in parts]
    expected = halves_sum([partial.cpu() for partial in partials])
    x, weight, bias = map(place, problems)
    whole = unrounded_linear(x, weight, slices)
    assert torch.equal(whole.cpu(), expected)
    assert torch.equal(sum_of_slices(torch.stack(partials)).cpu(), expected)
    rounded = (expected + bias.cpu().float()).to(exact)
    assert torch.equal(linear(x, weight, bias, splits=Splits.FIXED, slices=slices).cpu(), rounded)


@SPLITS
@pytest.mark.parametrize("num_tokens", [1, 21])
def test_a_product_that_is_not_rounded_is_that_of_the_numbers(place, dtype, splits, num_tokens):
    """Of 16 bits, to what float32 holds: a router's choice depends on less than they could tell."""
    x, weight, _ = problem((num_tokens, 70, 130), dtype)
    ours = unrounded_linear(place(x), place(weight), splits=splits)
    expected = (x.double() @ weight.double().t()).float()
    torch.testing.assert_close(ours.cpu(), expected, rtol=0, atol=1e-6 * expected.abs().max().item())


def test_the_number_of_threads_does_not_change_a_bit(threads):
    """Threads share columns out, never a sum."""
    x, weight, _ = problem((21, 77, 130), torch.float32)
    one = [linear(x, weight, slices=slices) for slices in (1, 2)]
    threads(2)
    assert all(torch.equal(linear(x, weight, slices=slices), one[slices - 1]) for slices in (1, 2))


@SPLITS
def test_a_row_does_not_feel_what_its_neighbours_hold(place, dtype, splits):
    x, weight, _ = problem((5, 20, 70), dtype)
    ours = place(weight)
    clean = linear(place(x), ours, splits=splits)
    for spoilt in (float("inf"), torch.finfo(dtype).max):
        x[1], x[3] = float("nan"), spoilt
        assert torch.equal(linear(place(x), ours, splits=splits)[[0, 2, 4]], clean[[0, 2, 4]])


@SPLITS
def test_nothing_to_multiply_launches_nothing(place, exact, splits):
    x, none, rows, without_inputs = (place(torch.zeros(*shape).to(exact)) for shape in ((2, 0), (0, 8), (3, 8), (3, 0)))
    assert linear(none, rows, splits=splits).shape == (0, 3)
    assert linear(x, without_inputs, place(torch.ones(3).to(exact)), splits=splits).tolist() == [[1.0] * 3] * 2


@SPLITS
def test_nothing_to_multiply_with_8_bits_launches_nothing(gpu, place, exact, splits):
    weight = placed(place, quantize_rows(torch.zeros(3, 8), INT8))
    assert scaled_linear(place(torch.zeros(0, 8).to(exact)), weight, splits=splits).shape == (0, 3)


@pytest.mark.parametrize(("dtype_of_weights", "worst"), [(INT8, 0.5 / 127), (FLOAT8, 2.0**-4)])
def test_rows_are_quantised_under_their_largest_number(dtype_of_weights, worst):
    weight = normal(5, 100) * torch.logspace(-5, 5, 5)[:, None]
    weight[2] = 0.0
    made = quantize_rows(weight.bfloat16(), dtype_of_weights)
    error = (made.values.float() * made.scales[:, None] - weight.bfloat16().float()).abs()
    assert (error <= worst * weight.abs().amax(dim=1, keepdim=True) * 1.01).all()
    assert made.scales[2] == 1.0
    with pytest.raises(KernelArgumentError, match=r"quantize_rows: .* cannot become torch.uint8"):
        quantize_rows(weight, torch.uint8)


def test_float8_weights_are_refused_where_a_gpu_has_no_such_numbers(gpu, place, monkeypatch):
    """An A100, say."""
    monkeypatch.setattr(architecture, "_current_capability", lambda: 80)
    x, weight, _ = scaled_problem((1, 2, 3), torch.float16, FLOAT8)
    with pytest.raises(KernelArgumentError, match="use int8"):
        scaled_linear(place(x), placed(place, weight))


@pytest.mark.parametrize(
    ("x", "weight", "bias", "wrong"),
    [
        (torch.zeros(2, 4), torch.zeros(3, 5), None, "x must have shape"),
        (torch.zeros(2, 4, dtype=torch.float64), torch.zeros(3, 4), None, "x must be torch.float32"),
        (torch.zeros(4, 2).T, torch.zeros(3, 4), None, "x must be contiguous"),
        (torch.zeros(2, 4), torch.zeros(3, 4, 1), None, "weight must have shape"),
        (torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(2), "bias must have shape"),
    ],
)
def test_what_the_docstring_of_linear_rules_out_is_refused(x, weight, bias, wrong):
    """Compiled code never sees it."""
    with pytest.raises(KernelArgumentError, match=wrong):
        linear(x, weight, bias)


@pytest.mark.parametrize("slices", [0, 5, 9, 18])
def test_only_so_many_slices_as_divide_the_inputs_are_taken(slices):
    with pytest.raises(KernelArgumentError, match=f"18 inputs have 1 to 8 equal slices, not {slices}"):
        linear(torch.zeros(1, 18), torch.zeros(2, 18), slices=slices)


@pytest.mark.parametrize(
    ("x", "values", "scales", "wrong"),
    [
        (torch.zeros(2, 4), torch.zeros(3, 4, dtype=INT8), torch.ones(3), "x must be torch.bfloat16 or"),
        (torch.zeros(2, 5).half(), torch.zeros(3, 4, dtype=INT8), torch.ones(3), "x must have shape"),
        (torch.zeros(2, 4).half(), torch.zeros(3, 4), torch.ones(3), "values must be torch.float8_e4m3fn or"),
        (torch.zeros(2, 4).half(), torch.zeros(3, 4, dtype=INT8), torch.ones(1, 1), "scales must have shape"),
    ],
)
def test_what_the_docstring_of_scaled_linear_rules_out_is_refused(x, values, scales, wrong, monkeypatch):
    """Scales of blocks, for one."""
    monkeypatch.setattr("paceline_kernels.gpu.has_kernels", lambda device: True)
    meta = [tensor.to("meta") for tensor in (x, values, scales)]
    with pytest.raises(KernelArgumentError, match=wrong):
        scaled_linear(meta[0], ScaledWeight(*meta[1:]))


def test_a_device_without_an_implementation_is_named():
    with pytest.raises(UnsupportedDeviceError, match="linear has no implementation for device 'meta'"):
        linear(torch.zeros(1, 4, device="meta"), torch.zeros(3, 4, device="meta"))
    weight = quantize_rows(torch.ones(2, 3), INT8)
    with pytest.raises(UnsupportedDeviceError, match="scaled_linear has no implementation for device 'cpu'"):
        scaled_linear(torch.zeros(1, 3), weight)

"""rms_norm: right against float64, invariant, and the residual is replaced by the sum; of rows and of heads."""

import pytest
import torch

from kernel_rig.tensors import normal
from paceline_kernels.errors import KernelArgumentError, UnsupportedDeviceError
from paceline_kernels.rms_norm import reference, rms_norm, rms_norm_heads, rms_norm_rounded

slow = pytest.mark.slow
# Half a unit in the last place of each type, with a little for float32's own sums.
ROUNDING = {torch.float16: 6e-4, torch.bfloat16: 5e-3, torch.float32: 3e-6}
SHAPES = [(1, 1), (3, 63), *(pytest.param(*shape, marks=slow) for shape in ((3, 7), (3, 100), (3, 129), (31, 63)))]
SHAPES += [pytest.param(*shape, marks=slow) for shape in ((33, 576), (3, 1025))]


def assert_close(ours, expected):
    """Equal but for the rounding of our type."""
    bound = ROUNDING[ours.dtype]
    torch.testing.assert_close(ours.cpu().float(), expected.float(), rtol=bound, atol=bound * 0.1)


@pytest.mark.parametrize(("num_tokens", "hidden"), SHAPES)
def test_rms_norm_equals_the_reference(place, dtype, num_tokens, hidden):
    x, weight = normal(num_tokens, hidden, dtype=dtype), normal(hidden, dtype=dtype, seed=1)
    assert_close(rms_norm(place(x), place(weight), 1e-5), reference.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize(
    ("num_tokens", "hidden"),
    [(1, 1), (5, 63), pytest.param(2, 129, marks=slow), pytest.param(2, 1025, marks=slow), (40, 50)],
)
def test_with_a_residual_the_sum_is_kept_and_normalised_as_it_is_kept(place, dtype, num_tokens, hidden):
    x, residual = (normal(num_tokens, hidden, dtype=dtype, seed=seed) for seed in range(2))
    ours, kept, weight = place(x), place(residual), place(normal(hidden, dtype=dtype, seed=2))
    out = rms_norm(ours, weight, 1e-5, residual=kept)
    assert torch.equal(kept.cpu(), residual + x)
    assert torch.equal(ours.cpu(), x)
    assert torch.equal(out, rms_norm(kept, weight, 1e-5))


@pytest.mark.parametrize("rounded_to", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "hidden", "adds"), [(3, 63, True), (2, 129, False), pytest.param(5, 1025, True, marks=slow)]
)
def test_rounded_rows_are_those_that_the_product_would_round(gpu, place, dtype, num_tokens, hidden, adds, rounded_to):
    """Bit for bit, of rows that were rounded to 16 bits before; one of zeros is among them, one of NaN and one near."""
    from paceline_kernels.scaled_linear.triton import round_rows

    x, residual = (normal(num_tokens, hidden, dtype=dtype, seed=seed) for seed in range(2))
    x[0], residual[0], x[1, 5] = 0.0, 0.0, float("nan")
    weight, kept = place(normal(hidden, dtype=dtype, seed=2)), [place(residual) if adds else None for _ in range(2)]
    found = rms_norm_rounded(place(x), weight, 1e-5, rounded_to, residual=kept[0])
    expected = round_rows(rms_norm(place(x), weight, 1e-5, residual=kept[1]), rounded_to)
    assert found.dtype == dtype
    assert_same_bits(found.numbers, expected.numbers)
    assert_same_bits(found.scales, expected.scales)
    if adds:
        assert_same_bits(*kept)
    assert found.scales[0] == 1.0
    assert found.scales[1].isnan()


def assert_same_bits(ours, others):
    assert torch.equal(ours.cpu().view(torch.uint8), others.cpu().view(torch.uint8))


def test_int8_rows_are_near_the_reference(gpu, place, exact):
    """Off by half a unit under each row's scale."""
    x, weight = normal(3, 129).to(exact), normal(129, seed=1).to(exact)
    found = rms_norm_rounded(place(x), place(weight), 1e-5, torch.int8)
    expected, scales = reference.rms_norm(x, weight, 1e-5), found.scales.cpu()
    assert ((found.numbers.cpu() * scales - expected).abs() <= 0.51 * scales + 1e-3 * expected.abs()).all()
    torch.testing.assert_close(scales[:, 0] * 127, expected.abs().amax(1), rtol=1e-3, atol=0)


def test_a_row_has_the_same_bits_in_any_batch(place, backend, dtype):
    """A CPU shares many rows out among threads; a GPU has a program for each."""
    x, weight = normal(4 if backend.is_gpu else 70, 129, dtype=dtype), place(normal(129, dtype=dtype, seed=1))
    together = rms_norm(place(x), weight, 1e-5)
    assert torch.equal(torch.cat([rms_norm(place(row[None]), weight, 1e-5) for row in x]), together)
    assert torch.equal(rms_norm(place(x[2:20]), weight, 1e-5), together[2:20])


def test_a_row_of_zeros_stays_zero_and_no_rows_stay_none(place, exact):
    weight = place(torch.ones(8).to(exact))
    assert torch.equal(rms_norm(place(torch.zeros(2, 8).to(exact)), weight, 1e-5).cpu(), torch.zeros(2, 8).to(exact))
    assert rms_norm(place(torch.zeros(0, 8).to(exact)), weight, 1e-5).shape == (0, 8)


def test_no_cpu_rounds_rows():
    with pytest.raises(UnsupportedDeviceError, match="rms_norm_rounded has no implementation for device 'cpu'"):
        rms_norm_rounded(torch.zeros(2, 8), torch.ones(8), 1e-5, torch.int8)


def test_a_residual_of_another_shape_is_refused():
    with pytest.raises(KernelArgumentError, match="residual must have shape"):
        rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-5, residual=torch.zeros(3, 8))


def test_a_row_that_no_program_can_hold_is_refused(gpu, place, exact):
    """Rather than normalised in parts."""
    with pytest.raises(KernelArgumentError, match="hidden must be at most 16384 on a GPU, not 20000"):
        rms_norm(place(torch.zeros(1, 20_000).to(exact)), place(torch.zeros(20_000).to(exact)), 1e-5)


@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_kv_heads", "head_dim"),
    [
        (2, 3, 1, 63),
        (40, 3, 2, 20),
        *(pytest.param(*shape, marks=slow) for shape in ((2, 17, 2, 64), (2, 2, 1, 100))),
    ],
)
def test_heads_are_normalised_each_by_itself(place, dtype, num_tokens, num_heads, num_kv_heads, head_dim):
    qkv = normal(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    query, key = (normal(head_dim, dtype=dtype, seed=seed) for seed in (1, 2))
    ours, alone = place(qkv), place(qkv[:1])
    for each in (ours, alone):
        rms_norm_heads(each, place(query), place(key), num_kv_heads, 1e-5)
    assert_close(ours, reference.rms_norm_heads(qkv, query, key, num_kv_heads, 1e-5))
    assert torch.equal(ours[:, -num_kv_heads:].cpu(), qkv[:, -num_kv_heads:])
    assert torch.equal(alone, ours[:1])


def test_heads_that_do_not_fit_their_norms_are_refused():
    with pytest.raises(KernelArgumentError, match="does not fit 2 KV heads"):
        rms_norm_heads(torch.zeros(1, 4, 8), torch.ones(8), torch.ones(8), 2, 1e-5)

"""What GPU kernels make of rows: right against the references at odd widths, invariant, and within their bounds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_kernels import block_copy as block_copy_package
from paceline_kernels import gpu
from paceline_kernels.activation import Gate
from paceline_kernels.activation import reference as activation_reference
from paceline_kernels.activation import triton as activation
from paceline_kernels.block_copy import reference as block_copy_reference
from paceline_kernels.block_copy import triton as block_copy
from paceline_kernels.errors import KernelArgumentError
from paceline_kernels.rms_norm import reference as rms_norm_reference
from paceline_kernels.rms_norm import triton as rms_norm
from paceline_kernels.take_rows import reference as take_rows_reference
from paceline_kernels.take_rows import triton as take_rows
from paceline_kernels.testing.bounds import BoundedMemory
from paceline_kernels.testing.tensors import normal

WIDTHS = [1, 63, 100, 129, 1025]
# Half a unit in the last place of each type, with a little for float32's own sums.
ROUNDING = {torch.float16: 6e-4, torch.bfloat16: 5e-3, torch.float32: 3e-6}


def assert_close(ours, expected):
    """Equal but for the rounding of our type."""
    bound = ROUNDING[ours.dtype]
    torch.testing.assert_close(ours.cpu().float(), expected.float(), rtol=bound, atol=bound * 0.1, equal_nan=True)


@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_equals_the_reference(place, dtype, width):
    x, weight = normal(3, width, dtype=dtype), normal(width, dtype=dtype, seed=1)
    expected = rms_norm_reference.rms_norm(x, weight, 1e-5)
    assert_close(rms_norm.rms_norm(place(x), place(weight), 1e-5, None), expected)
    assert_close(rms_norm.rms_norm(place(x[1:2]), place(weight), 1e-5, None), expected[1:2])


@pytest.mark.parametrize("width", WIDTHS)
def test_with_a_residual_the_sum_is_kept_and_normalised_as_it_is_kept(place, dtype, width):
    x, residual, weight = (normal(2, width, dtype=dtype, seed=i) for i in range(3))
    ours, kept, gain = place(x), place(residual), place(weight[0])
    out = rms_norm.rms_norm(ours, gain, 1e-5, kept)
    assert torch.equal(kept.cpu(), residual + x)
    assert torch.equal(ours.cpu(), x)
    assert torch.equal(out, rms_norm.rms_norm(kept, gain, 1e-5, None))


def test_a_row_has_the_same_bits_alone(place, dtype):
    x, weight = normal(4, 129, dtype=dtype), place(normal(129, dtype=dtype, seed=1))
    rows = [rms_norm.rms_norm(place(row[None]), weight, 1e-5, None) for row in x]
    assert torch.equal(torch.cat(rows), rms_norm.rms_norm(place(x), weight, 1e-5, None))


def test_a_row_that_no_program_can_hold_is_refused(place):
    """Rather than normalised in parts."""
    with pytest.raises(KernelArgumentError, match="hidden must be at most 16384 on a GPU, not 20000"):
        rms_norm.rms_norm(place(torch.zeros(1, 20_000)), place(torch.zeros(20_000)), 1e-5, None)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(3, 1, 63), (17, 2, 64), (2, 1, 100)])
def test_heads_are_normalised_each_by_itself(place, dtype, num_heads, num_kv_heads, head_dim):
    qkv = normal(2, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    query, key = normal(head_dim, dtype=dtype, seed=1), normal(head_dim, dtype=dtype, seed=2)
    ours = place(qkv)
    rms_norm.rms_norm_heads(ours, place(query), place(key), num_kv_heads, 1e-5)
    expected = rms_norm_reference.rms_norm_heads(qkv, query, key, num_kv_heads, 1e-5)
    assert_close(ours, expected)
    assert torch.equal(ours[:, -num_kv_heads:].cpu(), qkv[:, -num_kv_heads:])


@pytest.mark.parametrize("gate", Gate)
@pytest.mark.parametrize("width", WIDTHS)
def test_gate_and_multiply_equals_the_reference(place, dtype, width, gate):
    gate_up = normal(2, 2 * width, dtype=torch.float32)
    gate_up[:, :width] *= torch.logspace(-3, 1.5, width)
    gate_up = gate_up.to(dtype)
    assert_close(
        activation.gate_and_multiply(place(gate_up), int(gate)), activation_reference.gate_and_multiply(gate_up, gate)
    )


@pytest.mark.parametrize("gate", Gate)
def test_gates_beyond_the_range_of_exp_saturate(place, gate):
    gates = torch.tensor([-1e30, -200.0, 200.0, 1e30, float("nan")])
    out = activation.gate_and_multiply(place(torch.cat((gates, torch.full((5,), 2.0)))[None]), int(gate))[0].cpu()
    assert out[:4].tolist() == [-0.0, -0.0, 400.0, torch.tensor(2e30).item()]
    assert out[4].isnan()


def test_softcap_equals_the_reference(place, dtype):
    """In place, for values far below the cap and far beyond it; NaN stays NaN."""
    x = (normal(2, 1025, dtype=torch.float32) * torch.logspace(-3, 3, 1025)).to(dtype)
    x[1, 7] = float("nan")
    ours = place(x)
    activation.softcap(ours, 30.0)
    rounding = 2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    expected = activation_reference.softcap(x, 30.0)
    torch.testing.assert_close(ours.cpu().float(), expected, rtol=rounding, atol=0, equal_nan=True)


@pytest.mark.parametrize("width", [1, 63, 2049])
def test_take_rows_equals_the_reference(place, dtype, width):
    table, indices = normal(5, width, dtype=dtype), torch.tensor([4, 0, 0, 2], dtype=torch.int32)
    ours = place(table), place(indices)
    assert torch.equal(take_rows.take_rows(*ours, 1.0).cpu(), take_rows_reference.take_rows(table, indices))
    assert torch.equal(take_rows.take_rows(*ours, 4.0).cpu(), take_rows_reference.take_rows(table, indices, 4.0))


@pytest.mark.parametrize("index", [-1, 3, 2**31 - 1])
def test_an_index_outside_of_the_table_gives_nan(place, index):
    """That row alone: a request fails, its neighbours do not."""
    indices = place(torch.tensor([0, index], dtype=torch.int32))
    out = take_rows.take_rows(place(torch.ones(3, 5)), indices, 1.0)
    assert out.isnan().all(dim=1).tolist() == [False, True]


@pytest.mark.parametrize("shape", [(3, 7, 2, 4, 5), (2, 7, 1025), (2, 7, 3)])
@pytest.mark.parametrize("cache_type", [torch.float16, torch.float8_e4m3fn, torch.int8, torch.float32])
def test_block_copy_equals_the_reference(place, shape, cache_type):
    cache = normal(*shape, dtype=torch.float32).mul(20).to(cache_type)
    sources, destinations = torch.tensor([1, 1, 6], dtype=torch.int32), torch.tensor([0, 3, 5], dtype=torch.int32)
    ours = place(cache)
    block_copy.block_copy(ours, place(sources), place(destinations))
    block_copy_reference.block_copy(cache, sources, destinations)
    assert torch.equal(ours.cpu().view(torch.uint8), cache.view(torch.uint8))


@settings(max_examples=settings.default.max_examples // 4, deadline=None)  # on a GPU the first one compiles
@given(data=st.data())
def test_an_id_that_is_no_block_copies_nothing(device, data):
    wrong = st.sampled_from([-1, -1, 9, -(2**31), 2**31 - 1])
    num_copies = data.draw(st.integers(1, 4))
    blocks = data.draw(st.permutations(range(9)))  # so that destinations are named once and are no sources
    ids = torch.tensor(blocks[: 2 * num_copies], dtype=torch.int32).view(2, num_copies)
    for copy in range(num_copies):
        if data.draw(st.booleans()):
            ids[data.draw(st.integers(0, 1)), copy] = data.draw(wrong)
    cache = normal(2, 9, 5, dtype=torch.float32)
    memory = BoundedMemory(device)
    ours = memory.place(cache)
    block_copy.block_copy(ours, *(memory.place(column) for column in ids))
    block_copy_reference.block_copy(cache, *ids)
    assert torch.equal(ours.cpu(), cache)
    assert memory.margins_are_untouched()


def test_only_block_ids_that_a_gpu_cannot_read_are_checked_and_sent(monkeypatch):
    given = []
    monkeypatch.setattr(gpu, "has_kernels", lambda device: device.type == "meta")
    monkeypatch.setattr(block_copy, "block_copy", lambda cache, *columns: given.append(columns))
    cache, host = torch.zeros(1, 7, 3, device="meta"), torch.tensor([-1, 3], dtype=torch.int32)
    device = host.to("meta")
    with pytest.raises(KernelArgumentError, match="block ids must be 0 to 6"):
        block_copy_package.block_copy(cache, host, host)
    with pytest.raises(KernelArgumentError, match="destinations must be in host memory"):
        block_copy_package.block_copy(cache, host[1:], device[1:])
    block_copy_package.block_copy(cache, host[1:], host[1:] + 1)
    block_copy_package.block_copy(cache, device, device)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda ids: True)
    block_copy_package.block_copy(cache, host, host)
    sent, *as_they_were = given
    assert [column.device.type for column in sent] == ["meta", "meta"]
    assert [[id(column) for column in columns] for columns in as_they_were] == [[id(device)] * 2, [id(host)] * 2]


def test_a_reference_on_another_device_makes_its_own_memory(place):
    ours = place(torch.zeros(1))
    elsewhere = torch.device("meta")
    assert torch.empty(2, 3, dtype=torch.int32, device=elsewhere).device == elsewhere
    assert torch.empty((2,), dtype=torch.float32, device=ours.device).isnan().all()


def test_nothing_to_do_launches_nothing(place):
    none = torch.zeros(0, dtype=torch.int32)
    assert rms_norm.rms_norm(place(torch.zeros(0, 8)), place(torch.ones(8)), 1e-5, None).shape == (0, 8)
    assert activation.gate_and_multiply(place(torch.zeros(0, 8)), Gate.SILU).shape == (0, 4)
    assert take_rows.take_rows(place(torch.zeros(3, 5)), place(none), 1.0).shape == (0, 5)
    activation.softcap(place(torch.zeros(0, 8)), 1.0)
    block_copy.block_copy(place(torch.zeros(1, 7, 3)), place(none), place(none))

"""block_copy copies whole blocks in all layers and refuses copies whose order would matter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_rig.tensors import int32, normal
from paceline_kernels import gpu as gpus
from paceline_kernels.block_copy import block_copy, reference
from paceline_kernels.errors import KernelArgumentError

slow = pytest.mark.slow


SHAPES = pytest.mark.parametrize("shape", [(3, 7, 2, 4, 5), (2, 7, 1025), pytest.param((2, 7, 3), marks=slow)])


@SHAPES
@pytest.mark.parametrize("cache_type", [torch.float16, torch.int8, pytest.param(torch.float32, marks=slow)])
def test_block_copy_equals_the_reference(place, shape, cache_type):
    assert_copied(place, normal(*shape).mul(20).to(cache_type))


@SHAPES
def test_float8_is_copied_on_a_gpu(gpu, place, shape):
    assert_copied(place, normal(*shape).mul(20).to(torch.float8_e4m3fn))


def assert_copied(place, cache):
    """Some blocks are, then none."""
    ours, ids = place(cache), (int32(1, 1, 6), int32(0, 3, 5))
    block_copy(ours, *map(place, ids))
    reference.block_copy(cache, *ids)
    for _ in range(2):
        assert torch.equal(ours.cpu().view(torch.uint8), cache.view(torch.uint8))
        block_copy(ours, place(int32()), place(int32()))


@settings(max_examples=settings.default.max_examples // 4, deadline=None)  # on a GPU the first one compiles
@given(data=st.data())
def test_an_id_that_is_no_block_copies_nothing_on_a_gpu(gpu, backend, data):
    wrong = st.sampled_from([-1, -1, 9, -(2**31), 2**31 - 1])
    num_copies = data.draw(st.integers(1, 4))
    blocks = data.draw(st.permutations(range(9)))  # so that destinations are named once and are no sources
    ids = torch.tensor(blocks[: 2 * num_copies], dtype=torch.int32).view(2, num_copies)
    for copy in range(num_copies):
        if data.draw(st.booleans()):
            ids[data.draw(st.integers(0, 1)), copy] = data.draw(wrong)
    cache = normal(2, 9, 5)
    with backend.memory() as place:
        ours = place(cache)
        block_copy(ours, *map(place, ids))
        reference.block_copy(cache, *ids)
        assert torch.equal(ours.cpu(), cache)


@pytest.mark.parametrize(
    ("sources", "destinations", "problem"),
    [
        ((0,), (7,), "block ids must be 0 to 6"),
        ((-1,), (1,), "block ids must be 0 to 6"),
        ((0, 1), (2, 2), "named once"),
        ((0, 1), (1, 2), "be no source"),
        ((0, 1), (2,), "destinations must have shape"),
    ],
)
def test_impossible_and_ambiguous_copies_are_refused(sources, destinations, problem):
    cache = torch.zeros(1, 7, 1, 1, 1)
    with pytest.raises(KernelArgumentError, match=problem):
        block_copy(cache, int32(*sources), int32(*destinations))


def test_block_ids_on_a_device_are_not_looked_at_for_a_cache_in_host_memory():
    """They would be waited for."""
    with pytest.raises(KernelArgumentError, match="sources must be in host memory"):
        block_copy(torch.zeros(1, 7, 1), int32(1).to("meta"), int32(2).to("meta"))


def test_only_block_ids_that_a_gpu_cannot_read_are_checked_and_sent(monkeypatch):
    kernels = pytest.importorskip("paceline_kernels.block_copy.triton")
    given = []
    monkeypatch.setattr(gpus, "has_kernels", lambda device: device.type == "meta")
    monkeypatch.setattr(kernels, "block_copy", lambda cache, *columns: given.append(columns))
    cache, host = torch.zeros(1, 7, 3, device="meta"), int32(-1, 3)
    device = host.to("meta")
    with pytest.raises(KernelArgumentError, match="block ids must be 0 to 6"):
        block_copy(cache, host, host)
    with pytest.raises(KernelArgumentError, match="destinations must be in host memory"):
        block_copy(cache, host[1:], device[1:])
    block_copy(cache, host[1:], host[1:] + 1)
    block_copy(cache, device, device)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda ids: True)
    block_copy(cache, host, host)
    sent, *as_they_were = given
    assert [column.device.type for column in sent] == ["meta", "meta"]
    assert [[id(column) for column in columns] for columns in as_they_were] == [[id(device)] * 2, [id(host)] * 2]

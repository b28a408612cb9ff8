"""block_copy copies whole blocks in all layers and refuses copies whose order would matter."""

import pytest
import torch

from paceline_kernels.block_copy import block_copy, reference
from paceline_kernels.errors import KernelArgumentError
from paceline_kernels.testing.tensors import int32


def test_block_copy_equals_the_reference():
    cache = torch.randn(3, 7, 2, 4, 5, generator=torch.Generator().manual_seed(0))
    expected = cache.clone()
    reference.block_copy(expected, int32(1, 1, 6), int32(0, 3, 5))
    block_copy(cache, int32(1, 1, 6), int32(0, 3, 5))
    assert torch.equal(cache, expected)


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

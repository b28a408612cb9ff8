"""gated_experts in parts: what ranks make of theirs adds up to the bits of one rank, near the reference."""

import pytest
import torch

from paceline_kernels.activation import Gate
from paceline_kernels.errors import KernelArgumentError
from paceline_kernels.experts import ExpertParts, gated_experts, reference, route
from paceline_kernels.linear import sum_of_slices
from paceline_kernels.routing import Routing

ROUTING = Routing(8, 3)


def operands(size=40):
    """Of seven tokens."""
    torch.manual_seed(0)
    x, logits = torch.randn(7, 24), torch.randn(7, ROUTING.num_experts)
    weights = torch.randn(8, 2 * size, 24) / 5, torch.randn(8, 24, size) / 6
    return x, route(logits, ROUTING), *weights


def assert_near(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("degree", [2, 4])
def test_groups_of_experts_add_up_to_the_same_bits(degree):
    """Of which one rank has some; what another one has adds nothing."""
    x, routes, gate_up, down = operands()
    expected = gated_experts(x, routes, gate_up, down, Gate.SILU, parts=ExpertParts(groups=4))
    sums = []
    for first in range(0, 8, 8 // degree):
        held = slice(first, first + 8 // degree)
        parts = ExpertParts(groups=4 // degree, first_expert=first)
        sums.append(gated_experts(x, routes, gate_up[held], down[held], Gate.SILU, parts=parts))
        assert_near(sums[-1], reference.gated_experts(x, routes, gate_up[held], down[held], Gate.SILU, first))
    assert torch.equal(sum_of_slices(torch.stack(sums)), expected)
    assert_near(expected, reference.gated_experts(x, routes, gate_up, down, Gate.SILU))


@pytest.mark.parametrize("degree", [2, 4])
def test_slices_of_experts_add_up_to_the_same_bits(degree):
    x, routes, gate_up, down = operands()
    expected = gated_experts(x, routes, gate_up, down, Gate.SILU, parts=ExpertParts(slices=4))
    sums = []
    gates, ups = (each.chunk(degree, 1) for each in gate_up.chunk(2, 1))
    for rank, own in enumerate(down.chunk(degree, 2)):
        own_gate_up, parts = torch.cat((gates[rank], ups[rank]), dim=1), ExpertParts(slices=4 // degree)
        sums.append(gated_experts(x, routes, own_gate_up, own.contiguous(), Gate.SILU, parts=parts))
    assert torch.equal(sum_of_slices(torch.stack(sums)), expected)
    assert_near(expected, reference.gated_experts(x, routes, gate_up, down, Gate.SILU))


@pytest.mark.parametrize("parts", [ExpertParts(slices=3), ExpertParts(groups=3)])
def test_parts_have_one_size(parts):
    with pytest.raises(KernelArgumentError, match="8 experts of 40 inputs have no"):
        gated_experts(*operands(), Gate.SILU, parts=parts)

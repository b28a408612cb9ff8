"""gated_experts in parts: what ranks make of theirs adds up to the bits of one rank, near the reference."""

import pytest
import torch

from kernel_rig.tensors import normal, placed
from paceline_kernels.activation import Gate
from paceline_kernels.errors import KernelArgumentError
from paceline_kernels.experts import ExpertParts, ScaledWeight, Splits, gated_experts, reference
from paceline_kernels.linear import sum_of_slices
from paceline_kernels.routing import Routing
from paceline_kernels.scaled_linear import quantize_rows

ROUTING = Routing(8, 3)


def operands(dtype, size=40):
    """Of seven tokens."""
    routes = reference.route(normal(7, ROUTING.num_experts, seed=1), ROUTING)
    gate_up, down = normal(8, 2 * size, 24, seed=2) / 5, normal(8, 24, size, seed=3) / 6
    return normal(7, 24).to(dtype), routes, gate_up.to(dtype), down.to(dtype)


def summed(x, routes, gate_up, down, parts, *, splits=Splits.FIXED, dtype=torch.float32):
    """Not rounded yet, as ranks add it up."""
    return gated_experts(x, routes, gate_up, down, Gate.SILU, splits=splits, parts=parts, dtype=dtype)


def assert_near(found, expected):
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=2e-6)


def assert_adds_up(place, operands, whole, parts_of_ranks):
    """parts_of_ranks: gates and ups, downs and parts of each. In x's type one rank's sum is rounded once."""
    x, routes, gate_up, down = operands
    ours = place(x), placed(place, routes)
    sums = [summed(*ours, place(up), place(out), parts) for up, out, parts in parts_of_ranks]
    total = sum_of_slices(torch.stack(sums))
    assert torch.equal(total, summed(*ours, place(gate_up), place(down), whole))
    assert torch.equal(total.to(x.dtype), summed(*ours, place(gate_up), place(down), whole, dtype=None))
    assert_near(total, reference.gated_experts(*operands, Gate.SILU))
    return sums


@pytest.mark.usefixtures("_products_by_row")
@pytest.mark.parametrize("degree", [2, 4])
def test_groups_of_experts_add_up_to_the_same_bits(place, exact, degree):
    """Of which one rank has some; what another one has adds nothing."""
    x, routes, gate_up, down = operands(exact)
    held = [slice(first, first + 8 // degree) for first in range(0, 8, 8 // degree)]
    parts = [(gate_up[own], down[own], ExpertParts(groups=4 // degree, first_expert=own.start)) for own in held]
    sums = assert_adds_up(place, (x, routes, gate_up, down), ExpertParts(groups=4), parts)
    for own, found in zip(held, sums, strict=True):
        assert_near(found, reference.gated_experts(x, routes, gate_up[own], down[own], Gate.SILU, own.start))


@pytest.mark.usefixtures("_products_by_row")
@pytest.mark.parametrize("degree", [2, 4])
def test_slices_of_experts_add_up_to_the_same_bits(place, exact, degree):
    x, routes, gate_up, down = operands(exact)
    gates, ups = (each.chunk(degree, 1) for each in gate_up.chunk(2, 1))
    parts = [
        (torch.cat((gates[rank], ups[rank]), dim=1), own.contiguous(), ExpertParts(slices=4 // degree))
        for rank, own in enumerate(down.chunk(degree, 2))
    ]
    assert_adds_up(place, (x, routes, gate_up, down), ExpertParts(slices=4), parts)


@pytest.mark.parametrize("num_tokens", [1, 7])
@pytest.mark.parametrize("kind", ["floats", pytest.param("8 bits", marks=pytest.mark.slow)])
def test_without_fixed_splits_a_rank_has_the_sum_of_its_experts(gpu, place, exact, num_tokens, kind):
    """Undivided; one token by the kernel of few slots."""
    x, routes, gate_up, down = operands(exact)
    x, routes = x[:num_tokens], type(routes)(routes.experts[:num_tokens], routes.weights[:num_tokens])
    held, weights = slice(5, 8), [gate_up[5:8], down[5:8]]
    if kind == "8 bits":
        rows = [quantize_rows(weight.flatten(0, 1), torch.int8) for weight in weights]
        narrow = [
            ScaledWeight(each.values.view(like.shape), each.scales.view(like.shape[:2]))
            for each, like in zip(rows, weights, strict=True)
        ]
        weights = [each.values.float() * each.scales[..., None] for each in narrow]
    own = [placed(place, each) for each in (narrow if kind == "8 bits" else weights)]
    parts = ExpertParts(groups=3, first_expert=held.start)
    found = summed(place(x), placed(place, routes), *own, parts, splits=Splits.EVEN)
    assert_near(found, reference.gated_experts(x, routes, *weights, Gate.SILU, held.start))


@pytest.mark.parametrize(("num_experts", "sizes"), [(None, [16]), (3, [16]), (24, [])])
def test_products_are_those_for_as_many_slots_as_a_ranks_experts_have(
    gpu, place, exact, monkeypatch, num_experts, sizes
):
    """Of all that tokens choose from: here few slots, where all are this rank's many."""
    from paceline_kernels.experts import triton as kernels

    found, group = [], kernels.group
    monkeypatch.setattr(kernels, "group", lambda *args: found.append(args[2]) or group(*args))
    x, routes, gate_up, down = operands(exact)
    x, routes = x[:4], type(routes)(routes.experts[:4], routes.weights[:4])
    parts = ExpertParts(first_expert=5, num_experts=num_experts)
    summed(place(x), placed(place, routes), place(gate_up[5:8]), place(down[5:8]), parts, splits=Splits.EVEN)
    assert found == sizes


@pytest.mark.parametrize("parts", [ExpertParts(slices=3), ExpertParts(groups=3)])
def test_parts_have_one_size(parts):
    with pytest.raises(KernelArgumentError, match="8 experts of 40 inputs have no"):
        gated_experts(*operands(torch.float32), Gate.SILU, parts=parts)

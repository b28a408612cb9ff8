"""silu_and_multiply: right against float64 over the whole range, invariant."""

import pytest
import torch

from paceline_kernels.activation import reference, silu_and_multiply
from paceline_kernels.errors import KernelArgumentError


@pytest.mark.parametrize(("num_tokens", "width"), [(1, 1), (3, 7), (7, 64), (8, 100), (33, 1000)])
def test_silu_and_multiply_equals_the_reference(num_tokens, width):
    """In the serial and in the parallel range of rows, for ordinary and for large gates."""
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(num_tokens, 2 * width, generator=generator)
    gate_up[:, :width] *= torch.logspace(-3, 2, width)
    torch.testing.assert_close(silu_and_multiply(gate_up), reference.silu_and_multiply(gate_up), rtol=1e-6, atol=1e-30)


def test_an_element_has_the_same_bits_in_any_batch():
    """Rows alone, and all of them together."""
    gate_up = torch.randn(20, 66, generator=torch.Generator().manual_seed(1))
    rows = [silu_and_multiply(row[None].clone()) for row in gate_up]
    assert torch.equal(torch.cat(rows), silu_and_multiply(gate_up))


def test_gates_beyond_the_range_of_exp_saturate():
    """Far left the gate is closed, far right it is open, NaN stays NaN."""
    gates = torch.tensor([-1e30, -200.0, 200.0, 1e30, float("nan")])
    out = silu_and_multiply(torch.cat((gates, torch.full((5,), 2.0)))[None])[0]
    assert out[:4].tolist() == [-0.0, -0.0, 400.0, torch.tensor(2e30).item()]
    assert out[4].isnan()


def test_an_odd_width_is_refused():
    """There is a gate for every value, or something is wrong."""
    with pytest.raises(KernelArgumentError, match="even width"):
        silu_and_multiply(torch.zeros(1, 3))

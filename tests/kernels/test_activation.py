"""gate_and_multiply, softcap: right against float64 over the whole range, invariant."""

import pytest
import torch

from paceline_kernels.activation import Gate, gate_and_multiply, reference, softcap
from paceline_kernels.errors import KernelArgumentError


@pytest.mark.parametrize("gate", Gate)
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 1), (3, 7), (7, 64), (8, 100), (33, 1000)])
def test_gate_and_multiply_equals_the_reference(num_tokens, width, gate):
    """In the serial and in the parallel range of rows, for ordinary and for large gates."""
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(num_tokens, 2 * width, generator=generator)
    gate_up[:, :width] *= torch.logspace(-3, 2, width)
    # GELU's gate comes close to zero far left, where only its distance from zero matters.
    bounds = {"rtol": 1e-6, "atol": 1e-30} if gate is Gate.SILU else {"rtol": 2e-6, "atol": 1e-6}
    expected = reference.gate_and_multiply(gate_up, gate)
    torch.testing.assert_close(gate_and_multiply(gate_up, gate), expected, **bounds)


@pytest.mark.parametrize("gate", Gate)
def test_an_element_has_the_same_bits_in_any_batch(gate):
    gate_up = torch.randn(20, 66, generator=torch.Generator().manual_seed(1))
    rows = [gate_and_multiply(row[None].clone(), gate) for row in gate_up]
    assert torch.equal(torch.cat(rows), gate_and_multiply(gate_up, gate))


@pytest.mark.parametrize("gate", Gate)
def test_gates_beyond_the_range_of_exp_saturate(gate):
    gates = torch.tensor([-1e30, -200.0, 200.0, 1e30, float("nan")])
    out = gate_and_multiply(torch.cat((gates, torch.full((5,), 2.0)))[None], gate)[0]
    assert out[:4].tolist() == [-0.0, -0.0, 400.0, torch.tensor(2e30).item()]
    assert out[4].isnan()


def test_an_odd_width_is_refused():
    with pytest.raises(KernelArgumentError, match="even width"):
        gate_and_multiply(torch.zeros(1, 3), Gate.SILU)


def test_softcap_equals_the_reference():
    """In place, for values far below the cap and far beyond it."""
    x = torch.randn(3, 101, generator=torch.Generator().manual_seed(2)) * torch.logspace(-3, 3, 101)
    expected = reference.softcap(x, 30.0)
    softcap(x, 30.0)
    torch.testing.assert_close(x, expected, rtol=1e-6, atol=0)


def test_a_cap_of_nothing_is_refused():
    """It would make every logit NaN."""
    with pytest.raises(KernelArgumentError, match="must be above 0"):
        softcap(torch.zeros(1, 3), 0.0)

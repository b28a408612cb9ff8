"""gate_and_multiply, softcap: right against float64 over the whole range, invariant."""

import pytest
import torch

from kernel_rig.tensors import normal
from paceline_kernels.activation import Gate, gate_and_multiply, gate_and_multiply_rounded, reference, softcap
from paceline_kernels.errors import KernelArgumentError, UnsupportedDeviceError

slow = pytest.mark.slow
GATES = pytest.mark.parametrize("gate", Gate)
# Half a unit in the last place of each type, with a little for float32's own operations.
ROUNDING = {torch.float16: 6e-4, torch.bfloat16: 5e-3}
# In the serial and in the parallel range of a CPU's rows, and of one block of a program and of several.
SHAPES = [(1, 1), *(pytest.param(*shape, marks=slow) for shape in ((2, 63), (3, 7), (7, 64), (2, 129))), (8, 100)]
SHAPES += [(2, 1025), pytest.param(33, 1000, marks=slow)]


@GATES
@pytest.mark.parametrize(("num_tokens", "width"), SHAPES)
def test_gate_and_multiply_equals_the_reference(place, dtype, num_tokens, width, gate):
    """For ordinary and for large gates."""
    gate_up = normal(num_tokens, 2 * width)
    gate_up[:, :width] *= torch.logspace(-3, 2 if dtype == torch.float32 else 1.5, width)
    gate_up = gate_up.to(dtype)
    ours = gate_and_multiply(place(gate_up), gate).cpu()
    bounds = {"rtol": ROUNDING.get(dtype), "atol": ROUNDING.get(dtype, 0) * 0.1}
    if dtype == torch.float32:
        # GELU's gate comes close to zero far left, where only its distance from zero matters.
        bounds = {"rtol": 1e-6, "atol": 1e-30} if gate is Gate.SILU else {"rtol": 2e-6, "atol": 1e-6}
    torch.testing.assert_close(ours.float(), reference.gate_and_multiply(gate_up, gate), **bounds)


@GATES
@pytest.mark.parametrize("rounded_to", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("num_tokens", "width"), [(3, 1), (4, 100), pytest.param(3, 8200, marks=slow)])
def test_rounded_gates_are_those_that_the_product_would_round(
    gpu, place, dtype, monkeypatch, num_tokens, width, gate, rounded_to
):
    """Bit for bit, of gates that were rounded to 16 bits before, whose largest may be in any block of a row."""
    from paceline_kernels.activation import triton as kernels
    from paceline_kernels.scaled_linear.triton import round_rows

    monkeypatch.setattr(kernels, "_ROW_BLOCK", 64 if width < 8192 else 8192)
    gate_up = normal(num_tokens, 2 * width).to(dtype)
    gate_up[0], gate_up[1, 0], gate_up[2, [-1, width - 1]] = 0.0, float("nan"), 9.0
    found = gate_and_multiply_rounded(place(gate_up), gate, rounded_to)
    expected = round_rows(gate_and_multiply(place(gate_up), gate), rounded_to)
    assert torch.equal(found.numbers.cpu().view(torch.uint8), expected.numbers.cpu().view(torch.uint8))
    assert torch.equal(found.scales.cpu().view(torch.uint8), expected.scales.cpu().view(torch.uint8))
    assert found.dtype == dtype
    assert found.scales[0] == 1.0
    assert found.scales[1].isnan()


@GATES
def test_int8_gates_are_near_the_reference(gpu, place, exact, gate):
    """Off by half a unit under each row's scale."""
    gate_up = normal(3, 200).to(exact)
    found = gate_and_multiply_rounded(place(gate_up), gate, torch.int8)
    expected, scales = reference.gate_and_multiply(gate_up, gate), found.scales.cpu()
    assert ((found.numbers.cpu() * scales - expected).abs() <= 0.51 * scales + 1e-3 * expected.abs()).all()
    torch.testing.assert_close(scales[:, 0] * 127, expected.abs().amax(1), rtol=1e-3, atol=0)


def test_no_cpu_rounds_gates():
    with pytest.raises(UnsupportedDeviceError, match="_rounded has no implementation for device 'cpu'"):
        gate_and_multiply_rounded(torch.zeros(2, 8), Gate.SILU, torch.int8)


@GATES
def test_an_element_has_the_same_bits_in_any_batch(place, exact, gate):
    gate_up = normal(20, 66, seed=1).to(exact)
    rows = [gate_and_multiply(place(row[None]), gate) for row in gate_up]
    assert torch.equal(torch.cat(rows), gate_and_multiply(place(gate_up), gate))


@GATES
def test_gates_beyond_the_range_of_exp_saturate(place, device, gate):
    wide = torch.bfloat16 if device.type == "cuda" else torch.float32
    gates = torch.tensor([-1e30, -200.0, 200.0, 1e30, float("nan")])
    given = torch.cat((gates, torch.full((5,), 2.0)))[None].to(wide)
    out = gate_and_multiply(place(given), gate)[0].cpu()
    assert out[:4].tolist() == [-0.0, -0.0, 400.0, 2 * given[0, 3].item()]
    assert out[4].isnan()


def test_softcap_equals_the_reference(place, dtype):
    """In place, for values far below the cap and far beyond it; NaN stays NaN."""
    x = (normal(3, 1025, seed=2) * torch.logspace(-3, 3, 1025)).to(dtype)
    x[1, 7] = float("nan")
    ours = place(x)
    softcap(ours, 30.0)
    rounding = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    expected = reference.softcap(x, 30.0)
    torch.testing.assert_close(ours.cpu().float(), expected, rtol=rounding, atol=0, equal_nan=True)


def test_no_rows_give_no_rows(place, exact):
    none = place(torch.zeros(0, 8).to(exact))
    assert gate_and_multiply(none, Gate.SILU).shape == (0, 4)
    softcap(none, 1.0)


def test_an_odd_width_is_refused():
    with pytest.raises(KernelArgumentError, match="even width"):
        gate_and_multiply(torch.zeros(1, 3), Gate.SILU)


def test_a_cap_of_nothing_is_refused():
    """It would make every logit NaN."""
    with pytest.raises(KernelArgumentError, match="must be above 0"):
        softcap(torch.zeros(1, 3), 0.0)

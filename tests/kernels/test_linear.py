"""linear: right against float64, and the same bits for a row whatever stands around it."""

import pytest
import torch

from paceline_kernels.compiler import jit
from paceline_kernels.errors import KernelArgumentError, UnsupportedDeviceError
from paceline_kernels.linear import linear, reference
from paceline_kernels.testing.tensors import normal

# (tokens, out, in): around the sizes of tiles, vectors and row blocks.
SHAPES = [(1, 1, 1), (1, 3, 8), (2, 5, 7), (3, 4, 9), (4, 6, 64), (5, 7, 63), (17, 100, 100), (130, 31, 1000)]


@pytest.mark.parametrize(("num_tokens", "num_out", "num_in"), SHAPES)
def test_linear_equals_the_reference(num_tokens, num_out, num_in):
    """Within rounding of a float32 sum, at odd shapes."""
    x, weight = normal(num_tokens, num_in), normal(num_out, num_in, seed=1)
    torch.testing.assert_close(linear(x, weight), reference.linear(x, weight), rtol=1e-5, atol=2e-6 * num_in**0.5)


@pytest.mark.parametrize(("num_out", "num_in"), [(96, 576), (57, 100), (64, 1536)])
def test_a_row_has_the_same_bits_alone_and_at_any_place_of_any_batch(num_out, num_in):
    x, weight = normal(150, num_in), normal(num_out, num_in, seed=1)
    alone = torch.cat([linear(x[i : i + 1], weight) for i in range(150)])
    for size in (2, 3, 4, 5, 7, 8, 16, 31, 33, 84, 85, 150):
        for start in {0, 1, 150 - size}:
            rows = slice(start, start + size)
            assert torch.equal(linear(x[rows].clone(), weight), alone[rows])


def test_a_row_does_not_feel_what_its_neighbours_hold():
    x, weight = normal(9, 40), normal(10, 40, seed=1)
    clean = linear(x, weight)
    x[3], x[5] = float("nan"), 1e38
    assert torch.equal(linear(x, weight)[[0, 1, 2, 4, 6, 7, 8]], clean[[0, 1, 2, 4, 6, 7, 8]])


@pytest.mark.skipif(jit.max_threads() < 2, reason="one core")
def test_the_number_of_threads_does_not_change_a_bit(threads):
    """Threads share columns out, never a sum."""
    x, weight = normal(21, 130), normal(77, 130, seed=1)
    one = linear(x, weight)
    threads(2)
    assert torch.equal(linear(x, weight), one)


def test_no_tokens_give_no_rows():
    assert linear(torch.zeros(0, 8), normal(3, 8)).shape == (0, 3)


def test_a_bias_is_added_to_every_row():
    """After the product, so that a row has the same bits with the bias added by hand."""
    x, weight, bias = normal(5, 8), normal(3, 8), normal(1, 3)[0]
    assert torch.equal(linear(x, weight, bias), linear(x, weight) + bias)
    torch.testing.assert_close(linear(x, weight, bias), reference.linear(x, weight, bias))
    with pytest.raises(KernelArgumentError, match="bias must have shape"):
        linear(x, weight, bias[:2])


@pytest.mark.parametrize(
    ("x", "weight", "problem"),
    [
        (torch.zeros(2, 4), torch.zeros(3, 5), "x must have shape"),
        (torch.zeros(2, 4, dtype=torch.float64), torch.zeros(3, 4), "x must be torch.float32"),
        (torch.zeros(4, 2).T, torch.zeros(3, 4), "x must be contiguous"),
        (torch.zeros(2, 4), torch.zeros(3, 4, 1), "weight must have shape"),
    ],
)
def test_what_the_docstring_rules_out_is_refused(x, weight, problem):
    """Compiled code never sees it."""
    with pytest.raises(KernelArgumentError, match=problem):
        linear(x, weight)


def test_a_device_without_an_implementation_is_named():
    with pytest.raises(UnsupportedDeviceError, match="linear has no implementation for device 'meta'"):
        linear(torch.zeros(1, 4, device="meta"), torch.zeros(3, 4, device="meta"))

"""exp and tanh: right to a few units in the last place over their whole range, and sound beyond it."""

import numpy as np

from paceline_kernels.compiler.jit import compiled_for_python
from paceline_kernels.vector.elementary import exp, exp_of_negative, tanh


@compiled_for_python
def exp_all(values, out):
    """exp of every element, in a loop that becomes vector code."""
    for i in range(len(values)):
        out[i] = exp(values[i])


@compiled_for_python
def exp_of_negative_all(values, out):
    """exp_of_negative of every element."""
    for i in range(len(values)):
        out[i] = exp_of_negative(values[i])


@compiled_for_python
def tanh_all(values, out):
    """tanh of every element."""
    for i in range(len(values)):
        out[i] = tanh(values[i])


def exp_of(values):
    """exp of an array."""
    out = np.full_like(values, np.nan)
    exp_all(values, out)
    return out


def test_exp_is_right_to_two_units_in_the_last_place():
    """Against float64, densely over the range in which the result is a normal float32."""
    values = np.linspace(-87.3, 88.7, 400_001, dtype=np.float32)
    expected = np.exp(values.astype(np.float64))
    assert np.abs(exp_of(values) / expected - 1).max() < 2 * 2.0**-24


def test_exp_of_negative_has_the_bits_of_exp():
    """At and below 0, where both are defined, and for NaN."""
    ends = np.array([-np.inf, -1e30, -88, -87.4, -87.34, -87.33, -0.0, 0, np.nan], dtype=np.float32)
    values = np.concatenate((np.linspace(-88, 0, 200_001, dtype=np.float32), ends))
    out = np.empty_like(values)
    exp_of_negative_all(values, out)
    np.testing.assert_array_equal(out.view(np.int32), exp_of(values).view(np.int32))


def test_exp_at_the_ends_of_its_range():
    """Exactly 1 at 0; 0, inf and NaN where they belong."""
    values = np.array([0, -np.inf, -1e30, -88, 89, np.inf, np.nan], dtype=np.float32)
    np.testing.assert_array_equal(exp_of(values), np.array([1, 0, 0, 0, np.inf, np.inf, np.nan], dtype=np.float32))


def test_exp_has_the_same_bits_in_vectors_and_in_remainders():
    values = np.linspace(-20, 3, 100, dtype=np.float32)
    whole = exp_of(values)
    for length in (1, 3, 7, 8, 9, 31, 33):
        np.testing.assert_array_equal(exp_of(values[50 : 50 + length].copy()), whole[50 : 50 + length])


def test_tanh_is_right_to_three_units_in_the_last_place():
    """Against float64, where it bends and where it is flat; NaN stays NaN."""
    values = np.concatenate((np.linspace(-10, 10, 200_001), np.geomspace(1e-30, 1e30, 1001))).astype(np.float32)
    values = np.append(values[values != 0], np.float32(np.nan))
    out = np.empty_like(values)
    tanh_all(values, out)
    expected = np.tanh(values[:-1].astype(np.float64))
    assert np.abs(out[:-1] / expected - 1).max() < 3 * 2.0**-24
    assert np.isnan(out[-1])

"""Elementary functions for compiled loops, element by element, so that a loop over them becomes vector code.

Knows float32 only. The same bits come out in a vector loop and in its scalar remainder, because nothing here may be
reassociated or contracted (see `jit`).
"""

import numpy as np

from paceline_kernels.compiler.jit import Float32, Int32, compiled

_LOG2_E = np.float32(1.44269504)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_HALF = np.float32(0.5)
_ONE = np.float32(1.0)
# exp underflows to a denormal below the first and overflows above the second.
_SMALLEST = np.float32(-87.33654)
_LARGEST = np.float32(88.72283)
_ZERO = np.float32(0.0)
_INFINITY = np.float32(np.inf)
_TWO = np.float32(2.0)
# Below this tanh is a polynomial, above it is made of exp.
_NEAR_ZERO = np.float32(0.625)


@compiled
def _reduced(x: Float32) -> tuple[Int32, Float32]:
    """n and p with e to the x = p * 2**n, p between 0.7 and 1.42; x between the bounds of `exp`."""
    exponent = np.floor(x * _LOG2_E + _HALF)
    r = x - exponent * _LN2_HIGH
    r = r - exponent * _LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + _ONE
    return np.int32(exponent), p


@compiled
def _power_of_two(exponent: Int32) -> Float32:
    """2 to an exponent of -126 to 127."""
    return np.int32((exponent + np.int32(127)) << np.int32(23)).view(np.float32)


@compiled
def exp(x: Float32) -> Float32:
    """e to the x within 2 units in the last place; 0 below -87.33, inf above 88.72, NaN for NaN.

    The argument is reduced by multiples of ln 2 kept in two parts, as in the Cephes library's expf.
    """
    clamped = min(max(x, _SMALLEST), _LARGEST)
    exponent, p = _reduced(clamped)
    # 2 to the exponent in two factors: 2**128 alone is not a float32.
    half = exponent >> np.int32(1)
    value = p * _power_of_two(half) * _power_of_two(exponent - half)
    value = _ZERO if x < _SMALLEST else value
    value = _INFINITY if x > _LARGEST else value
    return value if x == x else x


@compiled
def exp_of_negative(x: Float32) -> Float32:
    """What `exp` gives, bit for bit, in less time; for x <= 0 and NaN, undefined above."""
    clamped = max(x, _SMALLEST)
    exponent, p = _reduced(clamped)
    value = p * _power_of_two(exponent)
    value = _ZERO if x < _SMALLEST else value
    return value if x == x else x


@compiled
def tanh(x: Float32) -> Float32:
    """The hyperbolic tangent within 3 units in the last place; NaN for NaN.

    Near zero the polynomial of the Cephes library's tanhf, else 1 - 2 / (e to the 2x + 1).
    """
    magnitude = abs(x)
    square = x * x
    p = np.float32(-5.70498872745e-3)
    p = p * square + np.float32(2.06390887954e-2)
    p = p * square + np.float32(-5.37397155531e-2)
    p = p * square + np.float32(1.33314422036e-1)
    p = p * square + np.float32(-3.33332819422e-1)
    near = x + x * square * p
    far = _ONE - _TWO / (exp(magnitude + magnitude) + _ONE)
    far = -far if x < _ZERO else far
    return near if magnitude < _NEAR_ZERO else far

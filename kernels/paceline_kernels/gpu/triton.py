"""How kernels round a row to 8 bits: under the scale that makes its largest magnitude the largest number of the type.

A row of zeros has the scale 1; one with NaN or infinity has that as its scale, so that products show it. Knows numbers
of one row; not where they come from.
"""

import triton
import triton.language as tl

# -128 is not used, as in weights.
_LARGEST_INT8, _LARGEST_FLOAT8 = tl.constexpr(127.0), tl.constexpr(448.0)
# The quotient of a row with less would be infinite; such rows count as zeros.
_SMALLEST = tl.constexpr(1e-30)


@triton.jit
def largest_bits(numbers):
    """Of the magnitudes of floats [n], the bits of the largest: as whole numbers those of NaN are beyond all others."""
    return tl.max(numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)


@triton.jit
def scale_row(bits, scales, row, TYPE: tl.constexpr):
    """Write the scale of a row whose largest magnitude has these bits; what its numbers are to be multiplied with."""
    most = _LARGEST_INT8 if tl.int8 == TYPE else _LARGEST_FLOAT8
    largest = bits.to(tl.float32, bitcast=True)
    largest = tl.where(largest <= _SMALLEST, most, largest)
    # Times a constant, because `/` may be off by two units in the last place.
    tl.store(scales + row, largest * (1.0 / most))
    return most / largest


@triton.jit
def rounded(numbers, factor, TYPE: tl.constexpr):
    """Ties go to the even one."""
    if tl.int8 == TYPE:
        # Adding 1.5 * 2**23 leaves no bits for a fraction, and a whole number in the lowest ones.
        return (numbers * factor + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    else:
        return (numbers * factor).to(TYPE)

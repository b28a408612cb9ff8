"""How a program adds up sums of slices, one after another, with the bits of `sum_of_slices`. Knows no product.

Of up to 8 sums three wait for a neighbour at most: one of one slice, one of two, one of four.
"""

import triton
import triton.language as tl


@triton.jit
def with_neighbours(number, sums, of_one, of_two, of_four):
    """Add those that the sums of this slice complete; what waits is kept for the next slices."""
    if number % 2 == 0:
        of_one = sums
    else:
        sums += of_one
        if number % 4 == 1:
            of_two = sums
        else:
            sums += of_two
            if number % 8 == 3:
                of_four = sums
            else:
                sums += of_four
    return sums, of_one, of_two, of_four


@triton.jit
def with_those_left(sums, of_two, of_four, SLICES: tl.constexpr):
    """Behind the last slice: those that have no neighbour, from the right on."""
    if SLICES == 3:
        sums += of_two
    elif SLICES == 5:
        sums += of_four
    elif SLICES == 7:
        sums = of_four + (of_two + sums)
    return sums

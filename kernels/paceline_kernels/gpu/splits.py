"""How a GPU divides a long sum, over a context or over the inputs of a product, among its programs. Knows no kernel.

Apart, because attention and products name it.
"""

import enum


class Splits(enum.Enum):
    """Whether a token's bits may depend on its batch mates."""

    EVEN = "even"  # all programs get the same share: fastest, and where a sum is cut depends on the batch
    FIXED = "fixed"  # cut at fixed positions, or not at all: the same bits in any batch

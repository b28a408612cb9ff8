"""What gates go through, by the numbers that compiled code knows them by. Knows no tensors.

Apart from the operation, which imports its backends: these name gates too.
"""

import enum


class Gate(enum.IntEnum):
    """A function of one number."""

    SILU = 0  # x / (1 + exp(-x))
    GELU_TANH = 1  # x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))

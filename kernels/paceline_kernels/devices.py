"""Which implementation serves a device: that for CPUs, or that for GPUs. Knows one switch, for tests.

Apart from `gpu`, because the checks of arguments ask it too.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_standing_in = [False]


def is_cpu(device: torch.device) -> bool:
    """Whether operations on this device are those for CPUs: it is one, and stands for no GPU."""
    return device.type == "cpu" and not _standing_in[0]


@contextmanager
def cpu_stands_for_gpu() -> Iterator[None]:
    """Within it CPU tensors, of float16 or float32, go to the kernels for GPUs, in all threads of the process.

    Triton has to interpret them (`TRITON_INTERPRET=1`, set before it is imported). So whatever is made of operations
    can be tested without a GPU, thousands of times slower than on one.
    """
    before, _standing_in[0] = _standing_in[0], True
    try:
        yield
    finally:
        _standing_in[0] = before

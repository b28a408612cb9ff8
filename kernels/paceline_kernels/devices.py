"""Which implementation serves a device: that for CPUs, or that for GPUs. Knows two switches, which nobody sets that
serves.

Apart from `gpu`, because the checks of arguments ask it too.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_standing_in = [False]
_rehearsing = [False]


def is_cpu(device: torch.device) -> bool:
    """Whether operations on this device are those for CPUs: it is one, and stands for no GPU."""
    return device.type == "cpu" and not _standing_in[0]


def stands_for_gpu(device: torch.device) -> bool:
    """Whether operations on this device, which is no GPU, are those for GPUs."""
    return _standing_in[0] if device.type == "cpu" else _rehearsing[0] and device.type == "meta"


@contextmanager
def meta_stands_for_gpu() -> Iterator[None]:
    """Within it tensors without numbers, of torch's device `meta`, go to the kernels for GPUs, in all threads of the
    process: for whoever wants to know which kernels are launched, and how. Somebody has to keep them from running.
    """
    before, _rehearsing[0] = _rehearsing[0], True
    try:
        yield
    finally:
        _rehearsing[0] = before


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

"""What the GPU implementations share: which devices they run on, and how a tile is chosen for one.

Knows compute capabilities. It refuses to know what a kernel computes.
"""

import importlib.util

import torch

from paceline_kernels.devices import stands_for_gpu
from paceline_kernels.errors import KernelArgumentError

# What operations without an implementation for CPUs have, and those with one, for their refusals of other devices.
GPU_ONLY = "cuda where Triton is installed"
DEVICES = f"cpu, and {GPU_ONLY}"


def has_kernels(device: torch.device) -> bool:
    """Whether operations have kernels for the device: it speaks CUDA or stands for what does, and Triton is installed.

    Raises KernelArgumentError for a GPU that is not the current one: a launch goes to that one's stream.
    """
    stands_in = stands_for_gpu(device)
    if (device.type != "cuda" and not stands_in) or importlib.util.find_spec("triton") is None:
        return False
    if not stands_in and device.index != torch.cuda.current_device():
        raise KernelArgumentError("a launch", f"the tensors are on {device}, which is not the current device")
    return True

"""What the GPU implementations share: which devices they run on, and how a tile is chosen for one.

Knows compute capabilities. It refuses to know what a kernel computes.
"""

import importlib.util

import torch

# What operations with implementations for both have, for their refusals of other devices.
DEVICES = "cpu, and cuda where Triton is installed"


def has_kernels(device: torch.device) -> bool:
    """Whether operations have an implementation for the device: it speaks CUDA, and Triton is installed."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None

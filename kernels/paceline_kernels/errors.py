"""The kernels' errors: one tree, all but the last mistakes of the caller, found before anything is written.

KernelError
├── KernelArgumentError       a tensor of the wrong shape, type or layout, or a number out of range
├── UnsupportedDeviceError    no implementation of this operation for the tensor's device
└── KernelCompileError        a compiler refuses a kernel
"""

import torch


class KernelError(Exception):
    """Base of every error an operation raises on purpose; `str(error)` names the operation."""


class KernelArgumentError(KernelError):
    """An argument that the operation's docstring rules out."""

    def __init__(self, op: str, problem: str) -> None:
        super().__init__(f"{op}: {problem}")


class UnsupportedDeviceError(KernelError):
    """The operation has no implementation for this device."""

    def __init__(self, op: str, device: torch.device, has: str = "cpu") -> None:
        super().__init__(f"{op} has no implementation for device '{device.type}'; this version has: {has}")


class KernelCompileError(KernelError):
    """A compiler refuses a kernel of this package: which one, and what it says."""

"""Checks of what an operation is given, made before compiled code, which checks nothing, sees an address.

Knows shapes, types and layouts. What the numbers mean is the caller's affair.
"""

import torch

from paceline_kernels.errors import KernelArgumentError


def check_tensor(op: str, name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int | None, ...]) -> None:
    """Refuse a tensor that has another type or shape (None: any size) or that is not contiguous."""
    if tensor.dtype != dtype:
        raise KernelArgumentError(op, f"{name} must be {dtype}, not {tensor.dtype}")
    actual = tensor.shape
    if len(actual) != len(shape) or any(w is not None and w != a for w, a in zip(shape, actual, strict=True)):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise KernelArgumentError(op, f"{name} must have shape [{wanted}], not {list(actual)}")
    if not tensor.is_contiguous():
        raise KernelArgumentError(op, f"{name} must be contiguous")

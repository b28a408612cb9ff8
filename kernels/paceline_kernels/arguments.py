"""Checks of what an operation is given, made before compiled code, which checks nothing, sees an address.

Knows shapes, types and layouts. What the numbers mean is the caller's affair.
"""

import torch

from paceline_kernels.devices import is_cpu
from paceline_kernels.errors import KernelArgumentError


def check_tensor(op: str, name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int | None, ...]) -> None:
    """Refuse a tensor that has another type or shape (None: any size) or that is not contiguous."""
    actual = tensor.shape
    if tensor.dtype == dtype and actual == shape and tensor.is_contiguous():
        return  # asked of a hundred columns in every step of a CPU
    if tensor.dtype != dtype:
        raise KernelArgumentError(op, f"{name} must be {dtype}, not {tensor.dtype}")
    if len(actual) != len(shape) or any(w is not None and w != a for w, a in zip(shape, actual, strict=True)):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise KernelArgumentError(op, f"{name} must have shape [{wanted}], not {list(actual)}")
    if not tensor.is_contiguous():
        raise KernelArgumentError(op, f"{name} must be contiguous")


def float_type(op: str, name: str, tensor: torch.Tensor) -> torch.dtype:
    """The tensor's type, if it is one of those computed with on its device: float32 on a CPU, two of 16 bits elsewhere.

    Where a CPU stands for a GPU, one of those two and float32: Triton's interpreter computes bfloat16 wrongly.
    Raises KernelArgumentError.
    """
    if tensor.device.type == "cpu":
        types = (torch.float32,) if is_cpu(tensor.device) else (torch.float16, torch.float32)
    else:
        types = (torch.bfloat16, torch.float16)
    if tensor.dtype not in types:
        raise KernelArgumentError(op, f"{name} must be {' or '.join(map(str, types))}, not {tensor.dtype}")
    return tensor.dtype


def check_caches(
    op: str,
    dtype: torch.dtype,
    head_dim: int,
    keys: tuple[torch.Tensor, torch.Tensor | None],
    values: tuple[torch.Tensor, torch.Tensor | None],
) -> None:
    """Refuse caches of other types or shapes than those of the queries' device, and scales that do not fit them.

    dtype: of the queries. keys, values: [num_blocks, num_kv_heads, block_size, head_dim], and what stored numbers are
    to be multiplied with: a number per head of float8_e4m3fn, per slot and head of int8, none of other types.
    Raises KernelArgumentError.
    """
    cache = keys[0]
    quantised = not is_cpu(cache.device) and cache.dtype in (torch.float8_e4m3fn, torch.int8)
    shape = (None, None, None, head_dim) if cache.ndim != 4 else (*cache.shape[:3], head_dim)
    scales_shape = shape[1:2] if cache.dtype == torch.float8_e4m3fn else shape[:3]
    for name, (stored, scales) in (("key", keys), ("value", values)):
        check_tensor(op, f"{name}_cache", stored, cache.dtype if quantised else dtype, shape)
        if (scales is not None) != quantised:
            raise KernelArgumentError(op, f"{name}_scales belong to caches of float8_e4m3fn and int8, and only to them")
        if scales is not None:
            check_tensor(op, f"{name}_scales", scales, torch.float32, scales_shape)

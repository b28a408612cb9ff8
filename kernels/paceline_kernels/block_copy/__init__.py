"""block_copy: whole KV blocks from one place to another. Knows blocks; not who owns them."""

import torch

from paceline_kernels import gpu
from paceline_kernels.arguments import check_tensor
from paceline_kernels.block_copy import cpu
from paceline_kernels.devices import is_cpu
from paceline_kernels.errors import KernelArgumentError, UnsupportedDeviceError


def block_copy(cache: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    """cache[:, destinations[i]] = cache[:, sources[i]] for every i, in place.

    cache: [num_layers, num_blocks, ...] any type, contiguous. sources, destinations: [num_copies] int32, in host
    memory, block ids. A destination is named once and is no source, so that the copies may run in any order.
    Reads host memory, so no captured graph can hold it.
    Raises KernelArgumentError, UnsupportedDeviceError.
    """
    check_tensor("block_copy", "cache", cache, cache.dtype, (None,) * cache.ndim)
    check_tensor("block_copy", "sources", sources, torch.int32, (None,))
    check_tensor("block_copy", "destinations", destinations, torch.int32, (sources.shape[0],))
    _check_blocks(cache.shape[1], sources.tolist(), destinations.tolist())
    if is_cpu(cache.device):
        cpu.block_copy(cache, sources, destinations)
    elif gpu.has_kernels(cache.device):
        from paceline_kernels.block_copy import triton

        triton.block_copy(cache, sources, destinations)
    else:
        raise UnsupportedDeviceError("block_copy", cache.device, gpu.DEVICES)


def _check_blocks(num_blocks: int, sources: list[int], destinations: list[int]) -> None:
    if not all(0 <= block < num_blocks for block in sources + destinations):
        raise KernelArgumentError("block_copy", f"block ids must be 0 to {num_blocks - 1}")
    targets = set(destinations)
    if len(targets) != len(destinations) or not targets.isdisjoint(sources):
        raise KernelArgumentError("block_copy", "a destination must be named once and be no source")

"""block_copy: whole KV blocks from one place to another. Knows blocks; not who owns them."""

import torch

from paceline_kernels import gpu
from paceline_kernels.arguments import check_tensor
from paceline_kernels.block_copy import cpu
from paceline_kernels.devices import is_cpu
from paceline_kernels.errors import KernelArgumentError, UnsupportedDeviceError


def block_copy(cache: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    """cache[:, destinations[i]] = cache[:, sources[i]] for every i, in place.

    cache: [num_layers, num_blocks, ...] any type, contiguous. sources, destinations: [num_copies] int32, block ids. A
    destination is named once and is no source, so that the copies may run in any order.

    Block ids in host memory are checked. For a cache on a GPU both columns may also lie where its kernels read them: on
    the cache's device, or in pinned host memory. The host then looks at none of them, so that a captured graph can hold
    the launch and be replayed with other ids: the caller has checked them, and an id that is no block's copies nothing.
    Such is -1, the padding by which a launch of one size serves fewer copies.
    Raises KernelArgumentError, UnsupportedDeviceError.
    """
    check_tensor("block_copy", "cache", cache, cache.dtype, (None,) * cache.ndim)
    check_tensor("block_copy", "sources", sources, torch.int32, (None,))
    check_tensor("block_copy", "destinations", destinations, torch.int32, (sources.shape[0],))
    if is_cpu(cache.device):
        _check_blocks(cache, sources, destinations)
        cpu.block_copy(cache, sources, destinations)
    elif gpu.has_kernels(cache.device):
        from paceline_kernels.block_copy import triton

        if not all(ids.device == cache.device or ids.is_pinned() for ids in (sources, destinations)):
            _check_blocks(cache, sources, destinations)
            sources, destinations = torch.stack((sources, destinations)).to(cache.device, non_blocking=True)
        triton.block_copy(cache, sources, destinations)
    else:
        raise UnsupportedDeviceError("block_copy", cache.device, gpu.DEVICES)


def _check_blocks(cache: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    num_blocks = cache.shape[1]
    for name, ids in (("sources", sources), ("destinations", destinations)):
        if ids.device.type != "cpu":
            raise KernelArgumentError(
                "block_copy", f"{name} must be in host memory, like the other column or the cache"
            )
        if not all(0 <= block < num_blocks for block in ids.tolist()):
            raise KernelArgumentError("block_copy", f"block ids must be 0 to {num_blocks - 1}")
    targets = set(destinations.tolist())
    if len(targets) != destinations.shape[0] or not targets.isdisjoint(sources.tolist()):
        raise KernelArgumentError("block_copy", "a destination must be named once and be no source")

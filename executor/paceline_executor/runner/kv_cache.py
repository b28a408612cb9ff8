"""The memory of the KV cache, of a CPU and of other devices. Refuses to know who owns a block."""

import numpy as np
import torch

from paceline_executor.errors import StartError
from paceline_executor.models.interface import KvCache
from paceline_executor.numerics import KvDtype, Numerics
from paceline_executor.runner.interface import CacheGeometry
from paceline_executor.weights.checkpoint import KvScales, ModelConfig

_ELEMENTS = {KvDtype.FLOAT32: np.float32, KvDtype.FLOAT16: np.float16, KvDtype.INT8: np.int8}
_DEVICE_TYPES = {
    KvDtype.FLOAT32: torch.float32,
    KvDtype.FLOAT16: torch.float16,
    KvDtype.BFLOAT16: torch.bfloat16,
    KvDtype.INT8: torch.int8,
    KvDtype.FP8_E4M3: torch.float8_e4m3fn,
}


def kv_geometry(config: ModelConfig, num_blocks: int, block_size: int, numerics: Numerics) -> CacheGeometry:
    return CacheGeometry(
        num_blocks=num_blocks,
        block_size=block_size,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        bytes_per_block=block_size * numerics.bytes_per_token(config),
    )


def allocate_kv_cache(geometry: CacheGeometry, dtype: KvDtype) -> KvCache:
    """Memory is taken when a block is first written to. Raises StartError."""
    return KvCache(_allocate(geometry, dtype), _allocate(geometry, dtype))


def _allocate(geometry: CacheGeometry, dtype: KvDtype) -> torch.Tensor:
    element = np.dtype(_ELEMENTS[dtype])
    slot = dtype.slot_bytes(geometry.head_dim) // element.itemsize
    shape = (geometry.num_layers, geometry.num_blocks, geometry.num_kv_heads, geometry.block_size, slot)
    try:
        return torch.from_numpy(np.zeros(shape, dtype=element))
    except MemoryError as error:
        size_mib = geometry.num_blocks * geometry.bytes_per_block >> 20
        raise StartError(f"the KV cache of {geometry.num_blocks} blocks needs {size_mib} MiB: use fewer") from error


def allocate_on_device(
    geometry: CacheGeometry, dtype: KvDtype, device: torch.device, scales: KvScales | None = None
) -> KvCache:
    """All zeros. scales: of fp8_e4m3; None is 1.0 for all."""
    cells = (geometry.num_layers, geometry.num_blocks, geometry.num_kv_heads, geometry.block_size)
    keys, values = (torch.zeros((*cells, geometry.head_dim), dtype=_DEVICE_TYPES[dtype], device=device) for _ in "kv")
    if dtype is KvDtype.INT8:
        return KvCache(keys, values, torch.zeros(cells, device=device), torch.zeros(cells, device=device))
    if dtype is not KvDtype.FP8_E4M3:
        return KvCache(keys, values)
    heads = (geometry.num_layers, geometry.num_kv_heads)
    cache = KvCache(keys, values, torch.ones(heads, device=device), torch.ones(heads, device=device))
    if scales is not None:
        set_scales(cache, scales)
    return cache


def set_scales(cache: KvCache, scales: KvScales) -> None:
    """In place: what is in the cache means nothing then."""
    for column, numbers in ((cache.key_scales, scales.keys), (cache.value_scales, scales.values)):
        if column is None or column.shape != numbers.shape:
            raise TypeError("a KV cache of this type has no scales of heads")
        column.copy_(torch.from_numpy(np.array(numbers)))

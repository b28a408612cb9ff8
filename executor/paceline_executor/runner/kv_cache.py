"""The memory of the KV cache of a CPU. Knows sizes and number types; not who owns a block."""

import numpy as np
import torch

from paceline_executor.errors import StartError
from paceline_executor.models.interface import KvCache
from paceline_executor.numerics import KvDtype, Numerics
from paceline_executor.runner.interface import KvGeometry
from paceline_executor.weights.checkpoint import ModelConfig

# What a slot is made of.
_ELEMENTS = {KvDtype.FLOAT32: np.float32, KvDtype.FLOAT16: np.float16, KvDtype.INT8: np.int8}


def kv_geometry(config: ModelConfig, num_blocks: int, block_size: int, numerics: Numerics) -> KvGeometry:
    return KvGeometry(
        num_blocks=num_blocks,
        block_size=block_size,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        bytes_per_block=block_size * numerics.bytes_per_token(config),
    )


def allocate_kv_cache(geometry: KvGeometry, dtype: KvDtype) -> KvCache:
    """Memory is taken when a block is first written to. Raises StartError."""
    return KvCache(_allocate(geometry, dtype), _allocate(geometry, dtype))


def _allocate(geometry: KvGeometry, dtype: KvDtype) -> torch.Tensor:
    element = np.dtype(_ELEMENTS[dtype])
    slot = dtype.slot_bytes(geometry.head_dim) // element.itemsize
    shape = (geometry.num_layers, geometry.num_blocks, geometry.num_kv_heads, geometry.block_size, slot)
    try:
        return torch.from_numpy(np.zeros(shape, dtype=element))
    except MemoryError as error:
        size_mib = geometry.num_blocks * geometry.bytes_per_block >> 20
        raise StartError(f"the KV cache of {geometry.num_blocks} blocks needs {size_mib} MiB: use fewer") from error

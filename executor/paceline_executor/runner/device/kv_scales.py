"""Scales for a KV cache of float8, where the checkpoint brings none: of what a model makes of random tokens.

Refuses to know who owns the cache.
"""

from dataclasses import replace

import numpy as np
import torch

from paceline_executor.models.interface import ForwardInputs, KvCache, LanguageModel
from paceline_executor.numerics import Numerics
from paceline_executor.runner.kv_cache import allocate_on_device, kv_geometry
from paceline_executor.weights.checkpoint import Float32Array, KvScales, ModelConfig

_MAX_FLOAT8 = 448.0
_HEADROOM = 4.0  # floats keep their precision at any size
_NUM_TOKENS = 512


def measured_scales(
    model: LanguageModel,
    config: ModelConfig,
    numerics: Numerics,
    device: torch.device,
    block_size: int,
    max_len: int,
) -> KvScales:
    """Of random tokens, the same each time, at positions below `max_len`."""
    cache = filled_cache(model, config, numerics, device, block_size, max_len)
    maxima = (part.float().abs().amax(dim=(1, 3, 4)).cpu().numpy() for part in (cache.keys, cache.values))
    return KvScales(*map(scales_of_maxima, maxima))


def filled_cache(
    model: LanguageModel,
    config: ModelConfig,
    numerics: Numerics,
    device: torch.device,
    block_size: int,
    max_len: int,
) -> KvCache:
    """What the model makes of these tokens, in its own type."""
    num_tokens = min(_NUM_TOKENS, max_len)
    dense = replace(numerics, kv=numerics.dense_kv)
    num_blocks = -(-num_tokens // block_size)
    cache = allocate_on_device(kv_geometry(config, num_blocks, block_size, dense), dense.kv, device)
    tokens = torch.randint(config.vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(0))

    def column(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    places = torch.arange(num_tokens, device=device)
    inputs = ForwardInputs(
        token_ids=tokens.int().to(device),
        positions=places.int(),
        slot_mapping=places,
        cu_seqlens=column(0, num_tokens),
        context_lens=column(num_tokens),
        block_tables=torch.arange(num_blocks, dtype=torch.int32, device=device)[None],
        logit_tokens=column(num_tokens - 1),
    )
    model.forward(inputs, cache)
    return cache


def scales_of_maxima(maxima: Float32Array) -> Float32Array:
    """Four times what was seen of each head fits; 1.0 where that was nothing, or no number.

    maxima: [num_layers, num_kv_heads], of absolute values.
    """
    is_usable = np.isfinite(maxima) & (maxima > 0)
    scales = np.where(is_usable, maxima, _MAX_FLOAT8 / _HEADROOM) * np.float32(_HEADROOM / _MAX_FLOAT8)
    return np.maximum(scales, np.finfo(np.float32).tiny).astype(np.float32)

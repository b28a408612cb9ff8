"""Scales of 8-bit keys and values that a safetensors folder brings, as llm-compressor and ModelOpt write them.

Knows their names and shapes: one number for a layer, or one for each of its KV heads.
"""

import numpy as np

from paceline_executor.errors import ModelCorruptError
from paceline_executor.weights.checkpoint import Float32Array, KvScales, ModelConfig
from paceline_executor.weights.refusals import damaged, shown
from paceline_executor.weights.stored_checkpoint import as_float32
from paceline_executor.weights.stored_tensor import FloatType, StoredTensor

_KEY_NAMES = ("k_scale", "k_proj.k_scale")
_VALUE_NAMES = ("v_scale", "v_proj.v_scale")


def take_kv_scales(config: ModelConfig, tensors: dict[str, StoredTensor]) -> KvScales | None:
    """Take them out of `tensors`, by Hugging Face name; None where there are none.

    Raises ModelCorruptError where some are missing, of a wrong shape, or not above 0.
    """
    keys, values = _take(config, tensors, _KEY_NAMES), _take(config, tensors, _VALUE_NAMES)
    found = [tensor for tensor in keys + values if tensor is not None]
    if not found:
        return None
    if len(found) < 2 * config.num_layers:
        problem = f"it has scales for {len(found)} of {2 * config.num_layers} halves of the KV cache"
        raise damaged(found[0].source.path, problem)
    return KvScales(*(np.stack([_read(config, part) for part in half if part is not None]) for half in (keys, values)))


def _take(config: ModelConfig, tensors: dict[str, StoredTensor], names: tuple[str, ...]) -> list[StoredTensor | None]:
    """Returns one per layer."""
    layers = [[f"model.layers.{layer}.self_attn.{name}" for name in names] for layer in range(config.num_layers)]
    return [next(filter(None, [tensors.pop(name, None) for name in known]), None) for known in layers]


def _read(config: ModelConfig, tensor: StoredTensor) -> Float32Array:
    num_scales = tensor.num_rows * tensor.row_numbers
    if tensor.stored is FloatType.FLOAT8_E4M3FN or num_scales not in (1, config.num_kv_heads):
        kind = f"of shape {tensor.shape}, neither one number nor one for each of {config.num_kv_heads} KV heads"
        raise _bad(tensor, kind)
    scales = as_float32(tensor).reshape(-1)
    if scales.min() <= 0:
        raise _bad(tensor, "not above 0")
    return np.broadcast_to(scales, (config.num_kv_heads,))


def _bad(tensor: StoredTensor, kind: str) -> ModelCorruptError:
    return damaged(tensor.source.path, f"tensor {shown(tensor.name)} is {kind}")

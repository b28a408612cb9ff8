"""Scales of keys and values that a folder brings: under either name, for a layer or for each head, or refused."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from paceline_executor.errors import ModelCorruptError
from paceline_executor.weights import load_checkpoint
from paceline_executor.weights.hf.kv_scales import take_kv_scales
from paceline_executor.weights.stored_tensor import FloatType, MemoryBytes, StoredTensor
from random_models import TINY_CONFIG, RandomCheckpoint

LAYERS, HEADS = TINY_CONFIG.num_layers, TINY_CONFIG.num_kv_heads


def stored(values, dtype=np.float32, kind=FloatType.FLOAT32):
    """A tensor of these numbers, in memory."""
    array = np.array(values, dtype)
    return StoredTensor("it", kind, array.shape, MemoryBytes(array.tobytes()), 0)


def tensors(keys, values, names=("k_scale", "v_scale")):
    """One of each for every layer, beside a weight."""
    parts = {names[0]: keys, names[1]: values}
    found = {
        f"model.layers.{layer}.self_attn.{name}": stored(part)
        for layer in range(LAYERS)
        for name, part in parts.items()
    }
    return found | {"model.norm.weight": stored([1.0])}


@pytest.mark.parametrize("names", [("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale")])
@pytest.mark.parametrize(("keys", "values"), [(0.5, 0.25), ([0.5], [0.25]), ([0.5] * HEADS, [[0.25]] * HEADS)])
def test_scales_of_layers_and_of_heads_are_read_under_either_name(names, keys, values):
    found = tensors(keys, values, names)
    scales = take_kv_scales(TINY_CONFIG, found)
    assert np.array_equal(scales.keys, np.full((LAYERS, HEADS), 0.5, np.float32))
    assert np.array_equal(scales.values, np.full((LAYERS, HEADS), 0.25, np.float32))
    assert list(found) == ["model.norm.weight"]


def test_each_head_keeps_its_own_scale():
    scales = take_kv_scales(TINY_CONFIG, tensors([1.0, 2.0], [3.0, 4.0]))
    assert scales.keys[1].tolist() == [1.0, 2.0]
    assert scales.values[0].tolist() == [3.0, 4.0]


def test_a_file_without_scales_brings_none():
    assert take_kv_scales(TINY_CONFIG, {"model.norm.weight": stored([1.0])}) is None
    assert RandomCheckpoint().kv_scales is None


@pytest.mark.parametrize(
    ("scale", "sentence"),
    [
        (stored([1.0, 1.0, 1.0]), r"of shape \(3,\), neither one number nor one for each of 2 KV heads"),
        (stored(0.0), "is not above 0"),
        (stored(-1.0), "is not above 0"),
        (stored(np.nan), "not finite"),
        (stored(8, np.uint8, FloatType.FLOAT8_E4M3FN), "neither one number"),
        (None, "it has scales for 3 of 4 halves"),
    ],
)
def test_scales_that_are_of_no_use_are_damage(scale, sentence):
    found = tensors(0.5, 0.5)
    found["model.layers.1.self_attn.v_scale"] = scale
    if scale is None:
        del found["model.layers.1.self_attn.v_scale"]
    with pytest.raises(ModelCorruptError, match=sentence):
        take_kv_scales(TINY_CONFIG, found)


def test_a_folder_with_scales_is_a_model_like_any_other(tmp_path):
    from transformers import AutoModelForCausalLM, LlamaConfig  # which takes seconds

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = AutoModelForCausalLM.from_config(config)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    scales = {f"model.layers.{layer}.self_attn.{part}_scale": torch.tensor(0.125) for layer in (0, 1) for part in "kv"}
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict() | {"architectures": ["LlamaForCausalLM"]}))
    save_file(weights | scales, tmp_path / "model.safetensors")

    checkpoint = load_checkpoint(tmp_path)
    assert np.array_equal(checkpoint.kv_scales.values, np.full((2, 2), 0.125, np.float32))
    assert np.array_equal(checkpoint.tensor("model.norm.weight"), np.ones(32, np.float32))

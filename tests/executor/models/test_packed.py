"""The packed Llama model: what it packs is what the file holds, and its logits are near those in float32."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType

from model_inputs import Row, inputs_of
from paceline_executor.models.interface import KvCache
from paceline_executor.models.layers import HostWeights
from paceline_executor.models.llama import LlamaModel
from paceline_executor.models.packed_llama import PackedLlamaModel, read_packed
from paceline_executor.testing.models import TINY_CONFIG, RandomCheckpoint, gguf_name, gguf_parts
from paceline_executor.weights import load_checkpoint
from paceline_kernels.quantized_linear import WeightFormat, unpack_rows

Q4_0, Q4_1, Q8_0, F16 = (GGMLQuantizationType[name] for name in ("Q4_0", "Q4_1", "Q8_0", "F16"))
CONFIG = replace(TINY_CONFIG, head_dim=32, tie_word_embeddings=False)
LENGTH = 100
QKV = tuple(f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv")


def written(path, kind, others=None):
    """A random model's file with matrices of this kind, but those whose names end like `others` of other kinds."""
    checkpoint = RandomCheckpoint(CONFIG)
    parts = gguf_parts(checkpoint, kind)
    for ending, other in (others or {}).items():
        of_other_kind = gguf_parts(checkpoint, other).tensors
        names = [gguf_name(name) for name in CONFIG.tensor_shapes() if name.endswith(f"{ending}.weight")]
        parts.tensors |= {name: of_other_kind[name] for name in names}
    return load_checkpoint(parts.write(path / "tiny.gguf"))


def unpacked(weight):
    """All rows, as float32."""
    return unpack_rows(weight, torch.arange(weight.num_outputs, dtype=torch.int32)).numpy()


def logits_of(model, kv_dtype):
    """The logits of all of a hundred tokens, computed at once."""
    slot = CONFIG.head_dim + (4 if kv_dtype == torch.int8 else 0)
    shape = (CONFIG.num_layers, 8, CONFIG.num_kv_heads, 16, slot)
    token_ids = np.random.default_rng(1).integers(0, CONFIG.vocab_size, LENGTH).tolist()
    inputs = inputs_of(Row(token_ids, range(7)), block_size=16)
    return model.forward(inputs, KvCache(*(torch.zeros(shape, dtype=kv_dtype) for _ in range(2))))


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.int8], ids=["float16", "int8"])
@pytest.mark.parametrize("kind", [Q4_0, Q4_1, Q8_0, F16], ids=lambda kind: kind.name)
def test_logits_are_near_those_in_float32(tmp_path, kind, kv_dtype):
    """Off by what int8 activations cost, and for F16 int8 weights: 2 to 3 hundredths of the logits' spread on average.

    A wrong scale, a group or a head out of its place, makes logits of their own, off by about the spread itself.
    """
    checkpoint = written(tmp_path, kind)
    exact = logits_of(LlamaModel(HostWeights(checkpoint), LENGTH), torch.float32)
    packed = logits_of(PackedLlamaModel(checkpoint, LENGTH), kv_dtype)
    errors = (packed - exact) / exact.std()
    assert errors.square().mean().sqrt() < 0.05
    assert errors.abs().max() < 0.3


@pytest.mark.parametrize(
    ("kind", "weight_format"), [(Q4_0, WeightFormat.INT4), (Q4_1, WeightFormat.INT4), (Q8_0, WeightFormat.INT8)]
)
def test_what_is_stored_in_groups_keeps_its_integers_and_scales(tmp_path, kind, weight_format):
    checkpoint = written(tmp_path, kind)
    packed = read_packed(checkpoint, QKV)
    assert packed.format == weight_format
    assert np.array_equal(unpacked(packed), np.concatenate([checkpoint.tensor(name) for name in QKV]))


def test_matrices_stored_in_different_ways_become_int8_together(tmp_path):
    """Those of 8 bits keep every bit; the others are off by half of a 127th of their group's largest at most."""
    checkpoint = written(tmp_path, Q4_1, {"k_proj": Q8_0, "v_proj": F16})
    packed = read_packed(checkpoint, QKV)
    queries, keys, values = np.split(unpacked(packed), [4 * 32, 6 * 32])
    assert packed.format == WeightFormat.INT8
    assert np.array_equal(keys, checkpoint.tensor(QKV[1]))
    for found, name in ((queries, QKV[0]), (values, QKV[2])):
        wanted = checkpoint.tensor(name)
        largest = np.abs(wanted).reshape(-1, 32).max(axis=1)
        errors = np.abs(found - wanted).reshape(-1, 32).max(axis=1)
        assert (errors <= largest / 253).all()  # not 254: the scale is rounded up to a float16


def test_a_file_of_many_types_is_computed(tmp_path):
    """Files of 4 bits per weight hold a few matrices in more."""
    checkpoint = written(tmp_path, Q4_1, {"down_proj": Q8_0, "v_proj": Q8_0, "embed_tokens": Q8_0, "lm_head": F16})
    exact = logits_of(LlamaModel(HostWeights(checkpoint), LENGTH), torch.float32)
    packed = logits_of(PackedLlamaModel(checkpoint, LENGTH), torch.float16)
    assert (packed - exact).square().mean().sqrt() < 0.05 * exact.std()

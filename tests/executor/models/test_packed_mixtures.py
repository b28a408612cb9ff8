"""Packed mixtures of experts: what is packed is what the file holds, and logits are near those in float32."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType

from model_inputs import Row, inputs_of
from paceline_executor.errors import UnsupportedModelError
from paceline_executor.models.interface import KvCache
from paceline_executor.models.layers import HostWeights
from paceline_executor.models.llama import LlamaModel
from paceline_executor.models.packed_llama import PackedLlamaModel
from paceline_executor.numerics import FLOAT32_NUMERICS, KvDtype, MatrixKind, Quantization, choose_cpu_numerics
from paceline_executor.weights import load_checkpoint
from paceline_executor.weights.checkpoint import Mixture, Rope
from paceline_executor.weights.grouped_rows import GroupedRows
from paceline_kernels.quantized_linear import WeightFormat, unpack_rows
from paceline_kernels.routing import Routing, Score
from random_models import TINY_CONFIG, RandomCheckpoint, gguf_mixture

LENGTH = 100
DENSE = replace(TINY_CONFIG, head_dim=32, tie_word_embeddings=False)
SPARSE = Mixture(Routing(4, 2), intermediate_size=96, sparse_layers=(True, True))
CONFIGS = {
    "norms over all heads": replace(DENSE, experts=SPARSE, qk_norm=True, qk_norm_spans_heads=True),
    "a dense layer, a shared expert with a gate": replace(
        DENSE,
        experts=Mixture(Routing(8, 3, renormalises=False), 32, (False, True), 64, has_shared_gate=True),
    ),
    "sigmoids, half of a head rotated": replace(
        DENSE,
        experts=Mixture(Routing(8, 2, Score.SIGMOID, True, 2.5, True, 4, 2), 32, (True, False), 64),
        rope=Rope(10_000.0, rotary_dim=16),
        qk_norm=True,
        qkv_bias=True,
    ),
}


def logits_of(model, config, kv_dtype=torch.int8):
    """The logits of all of a hundred tokens, computed at once."""
    slot = config.head_dim + (4 if kv_dtype == torch.int8 else 0)
    shape = (config.num_layers, 8, config.num_kv_heads, 16, slot)
    token_ids = np.random.default_rng(1).integers(0, config.vocab_size, LENGTH).tolist()
    inputs = inputs_of(Row(token_ids, range(7)), block_size=16)
    return model.forward(inputs, KvCache(*(torch.zeros(shape, dtype=kv_dtype) for _ in range(2))))


def assert_near(checkpoint):
    """Half of the tokens within what int8 activations cost.

    A token that they send to another expert is off by as much as that expert differs, and so is what attends to it; a
    wrong expert, weight or place makes all logits others, off by about their spread.
    """
    exact = logits_of(LlamaModel(HostWeights(checkpoint), LENGTH), checkpoint.config, torch.float32)
    packed = logits_of(PackedLlamaModel(checkpoint, LENGTH), checkpoint.config)
    errors = ((packed - exact) / exact.std()).square().mean(dim=1).sqrt()
    assert errors.median() < 0.05
    assert errors.quantile(0.8) < 0.15


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_logits_of_8_bits_are_near_those_in_float32(config):
    assert_near(RandomCheckpoint(config))


def test_a_gguf_file_of_4_bits_keeps_its_integers_and_scales(tmp_path):
    """One tensor holds a matrix of all experts."""
    parts = gguf_mixture(RandomCheckpoint(replace(DENSE, experts=SPARSE)), GGMLQuantizationType.Q4_0)
    checkpoint = load_checkpoint(parts.write(tmp_path / "mixture.gguf"))
    experts = PackedLlamaModel(checkpoint, LENGTH)._weights.layers[1].experts
    for packed, names in ((experts.gate_up, ("gate", "up")), (experts.down, ("down",))):
        rows = unpack_rows(packed, torch.arange(packed.num_outputs, dtype=torch.int32)).numpy()
        stored = [f"model.layers.1.mlp.experts.{expert}.{name}_proj.weight" for expert in range(4) for name in names]
        assert packed.format == WeightFormat.INT4
        assert np.array_equal(rows, np.concatenate([checkpoint.tensor(name) for name in stored]))
    assert_near(checkpoint)


class OneOtherwise(RandomCheckpoint):
    """Experts of 4 bits, the last with zeros that times their scales are no float16."""

    def quantized(self, name):
        if ".experts." not in name:
            return None
        shape, generator = self.config.tensor_shapes()[name], np.random.default_rng(0)
        scales = np.full((shape[0], shape[1] // 32), 0.1, np.float16).astype(np.float32)
        zeros = np.full(scales.shape, 7.0 if ".experts.3." in name else 8.0, np.float32)
        return GroupedRows(4, generator.integers(0, 16, shape, np.uint8), scales, 32, zeros=zeros)


class Sending(RandomCheckpoint):
    """Corrections send all tokens of the first layer to two experts of eight."""

    def tensor(self, name):
        values = super().tensor(name)
        return np.float32([9, 9, 0, 0, 0, 0, 0, 0]) if name.startswith("model.layers.0.") and "bias" in name else values


def test_layers_by_turns_tell_the_load_of_their_busiest_expert():
    mixture = Mixture(Routing(8, 2, Score.SIGMOID, has_bias=True), 32, (True, True))
    model = PackedLlamaModel(Sending(replace(DENSE, experts=mixture)), LENGTH)
    loads = [model.expert_load_ratio()]
    for _ in range(3):
        logits_of(model, DENSE)
        loads.append(model.expert_load_ratio())
    assert loads[:2] == [None, 4.0]
    assert 1.0 <= loads[2] < 4.0
    assert loads[3] == 4.0


def test_experts_packed_in_more_than_one_way_are_refused():
    with pytest.raises(UnsupportedModelError, match=r"layers\.0\.mlp\.experts\.3.*: not packed as expert 0 is"):
        PackedLlamaModel(OneOtherwise(replace(DENSE, experts=SPARSE)), LENGTH)


@pytest.mark.parametrize(("size", "shared_size"), [(48, 0), (64, 80)])
def test_experts_of_sizes_that_groups_do_not_divide_are_computed_in_float32(size, shared_size):
    config = replace(DENSE, experts=replace(SPARSE, intermediate_size=size, shared_intermediate_size=shared_size))
    assert choose_cpu_numerics(Quantization.AUTO, None, config, 16) == FLOAT32_NUMERICS


def test_mixtures_are_packed_where_nothing_is_asked_for():
    numerics = choose_cpu_numerics(Quantization.AUTO, None, replace(DENSE, experts=SPARSE), 16)
    assert (numerics.matrices, numerics.kv) == (MatrixKind.PACKED, KvDtype.INT8)

"""Random weights for benchmarks: of the model's shape, the same every time, and such that results stay ordinary."""

from dataclasses import replace

import pytest
import torch

from model_inputs import Row, inputs_of
from paceline_executor.models import dummy
from paceline_executor.models.dummy import DummyWeights
from paceline_executor.models.interface import KvCache
from paceline_executor.models.layers import DOWN, GATE_UP, OUTPUT, QKV, LayerReader
from paceline_executor.models.llama import LlamaModel
from random_models import FAMILY_CONFIGS

CPU = torch.device("cpu")
CONFIG = replace(FAMILY_CONFIGS["llama"], num_layers=3)
NUM_TOKENS = 30


def weights_of(config=CONFIG, *, is_float8=False, dtype=torch.bfloat16, seed=0):
    """Random weights on the CPU."""
    return DummyWeights(config, CPU, dtype, is_float8, seed)


def logits_of(config):
    """Those of one row's tokens, in float32."""
    inputs = inputs_of(Row(range(NUM_TOKENS), range(2)), block_size=16)
    cache = [torch.zeros(config.num_layers, 2, config.num_kv_heads, 16, config.head_dim) for _ in range(2)]
    return LlamaModel(weights_of(config, dtype=torch.float32), 64).forward(inputs, KvCache(*cache))


@pytest.mark.parametrize("family", FAMILY_CONFIGS)
def test_a_model_of_them_computes_ordinary_numbers(family):
    """Logits that differ from token to token, none of them huge: sampling has something to do."""
    logits = logits_of(FAMILY_CONFIGS[family])
    assert logits.shape == (NUM_TOKENS, CONFIG.vocab_size)
    assert 0.1 < logits.std() < 30
    assert not torch.equal(logits[0], logits[1])
    assert torch.equal(logits, logits_of(FAMILY_CONFIGS[family]))


@pytest.mark.parametrize("is_float8", [False, True])
@pytest.mark.parametrize(
    ("parts", "shape"), [(QKV, (256, 64)), (OUTPUT, (64, 128)), (GATE_UP, (192, 64)), (DOWN, (64, 96))]
)
def test_matrices_that_take_the_same_input_are_one(parts, shape, is_float8):
    layer = LayerReader(weights_of(is_float8=is_float8), 1).linear(*parts)
    assert layer.bias.shape == shape[:1]
    if is_float8:
        assert (layer.weight.values.shape, layer.weight.values.dtype) == (shape, torch.float8_e4m3fn)
        assert (layer.weight.scales.shape, layer.weight.scales.dtype) == (shape[:1], torch.float32)
    else:
        assert (layer.weight.shape, layer.weight.dtype) == (shape, torch.bfloat16)


def test_every_matrix_and_every_seed_has_numbers_of_its_own():
    def values(layer, seed=0):
        return LayerReader(weights_of(seed=seed), layer).linear(*QKV).weight

    assert torch.equal(values(0), values(0))
    assert not torch.equal(values(0), values(1))
    assert not torch.equal(values(0), values(0, seed=1))


def test_float8_is_made_in_parts(monkeypatch):
    monkeypatch.setattr(dummy, "_NUMBERS_AT_ONCE", 5 * 64)
    weight = LayerReader(weights_of(is_float8=True), 0).linear(*QKV).weight
    rows = weight.values.float() * weight.scales[:, None]
    assert (rows.std(dim=1) / 64**-0.5 - 1).abs().max() < 0.5
    assert rows.unique(dim=0).shape == rows.shape

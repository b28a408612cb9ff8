"""Random weights for benchmarks: of the model's shape, the same every time, and such that results stay ordinary."""

from dataclasses import replace

import pytest
import torch

from model_inputs import Row, inputs_of
from paceline_executor.models import dummy
from paceline_executor.models.dummy import DummyWeights
from paceline_executor.models.interface import KvCache
from paceline_executor.models.layers import DOWN, GATE_UP, OUTPUT, QKV, GroupedLinear, LayerReader, bytes_of
from paceline_executor.models.llama import LlamaModel
from paceline_executor.models.shapes import ShapeWeights
from paceline_executor.numerics import KvDtype, MatrixKind, Numerics
from paceline_executor.upload.grouping import expected_weight
from paceline_executor.weights.stored_tensor import FloatType, GroupedType
from paceline_kernels.grouped_linear import GroupedWeight, unpack_grouped
from paceline_kernels.linear import Splits
from paceline_kernels.scaled_linear import ScaledWeight
from random_models import FAMILY_CONFIGS, MIXTURE_CONFIGS

CPU = torch.device("cpu")
CONFIG = replace(FAMILY_CONFIGS["llama"], num_layers=3)
CONFIGS = FAMILY_CONFIGS | MIXTURE_CONFIGS
NUM_TOKENS = 30


def weights_of(config=CONFIG, *, is_float8=False, dtype=torch.bfloat16, stored=None, seed=0):
    """Random weights on the CPU. stored: how all matrices are."""
    kinds = dict.fromkeys(config.tensor_shapes(), stored) if stored else {}
    return DummyWeights(config, CPU, dtype, is_float8, kinds, seed)


def logits_of(config):
    """Those of one row's tokens, in float32."""
    inputs = inputs_of(Row(range(NUM_TOKENS), range(2)), block_size=16)
    cache = [torch.zeros(config.num_layers, 2, config.num_kv_heads, 16, config.head_dim) for _ in range(2)]
    return LlamaModel(weights_of(config, dtype=torch.float32), 64).forward(inputs, KvCache(*cache))


@pytest.mark.parametrize("family", CONFIGS)
def test_a_model_of_them_computes_ordinary_numbers(family):
    """Logits that differ from token to token, none of them huge: sampling has something to do."""
    logits = logits_of(CONFIGS[family])
    assert logits.shape == (NUM_TOKENS, CONFIG.vocab_size)
    assert 0.1 < logits.std() < 30
    assert not torch.equal(logits[0], logits[1])
    assert torch.equal(logits, logits_of(CONFIGS[family]))


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


@pytest.mark.parametrize(
    "stored",
    [
        GroupedType("plain", 4, group=32, scales=FloatType.BFLOAT16),
        GroupedType("zeros", 4, group=64, scales=FloatType.BFLOAT16, has_zeros=True),
        GroupedType("ordered", 8, has_zeros=True, is_ordered=True),
    ],
    ids=lambda stored: stored.name,
)
def test_groups_have_unit_gain_and_all_that_a_checkpoint_says(stored):
    weights = weights_of(dtype=torch.float32, stored=stored)
    names = [LayerReader(weights, 0).names(part)[0] for part in QKV]
    expected = expected_weight(stored, (128, 64), torch.bfloat16, torch.device("meta"))
    for name in names:
        weight = weights.linear((name,)).weight
        assert replace(weight.layout, num_outputs=128) == expected.layout
        assert [part is None for part in fields_of(weight)] == [part is None for part in fields_of(expected)]
        numbers = unpack_grouped(weight, torch.float32)
        assert 0.8 < numbers.std() * 64**0.5 < 1.2
        assert numbers.mean().abs() * 64**0.5 < 0.3
        assert weight.order is None or sorted(weight.order.tolist()) == list(range(64))
    x = torch.randn(3, 64)
    whole = LayerReader(weights, 0).linear(*QKV)(x, Splits.EVEN)
    assert torch.equal(whole, torch.cat([weights.linear((name,))(x, Splits.EVEN) for name in names], dim=1))


@pytest.mark.parametrize(
    ("stored", "is_float8"),
    [
        (None, False),
        (None, True),
        (GroupedType("groups", 4, group=32, scales=FloatType.BFLOAT16, has_zeros=True), False),
        (GroupedType("rows", 8, is_w8a8=True), False),
        (GroupedType("ordered", 4, group=32, scales=FloatType.BFLOAT16, is_ordered=True), False),
    ],
    ids=str,
)
def test_experts_are_made_as_they_are_uploaded(stored, is_float8):
    """Of unit gain, none like another."""
    config = MIXTURE_CONFIGS["qwen2moe"]
    weights = weights_of(config, is_float8=is_float8, stored=stored)
    kind = MatrixKind.FLOAT8 if is_float8 else MatrixKind.AS_STORED
    expected = ShapeWeights(config, torch.bfloat16, kind, weights.stored).experts(1)
    for made, shape, width in zip(weights.experts(1), expected, (64, 48), strict=True):
        assert type(made) is type(shape)
        assert bytes_of(made) == bytes_of(shape)
        if isinstance(made, GroupedWeight):
            made = unpack_grouped(made, torch.float32).unflatten(0, (8, -1))
        elif isinstance(made, ScaledWeight):
            made = made.values.float() * made.scales[..., None]
        assert 0.8 < made.float().std() * width**0.5 < 1.2
        assert made.flatten(1).unique(dim=0).shape[0] == 8


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [0, 24, 32, 48, 64, 96, 128, 192, 256])
def test_memory_is_planned_for_groups_of_any_size(bits, group):
    """Matrices whose groups lie across tiles become dense."""
    config, name = replace(CONFIG, hidden_size=256, intermediate_size=384), "model.layers.0.mlp.down_proj.weight"
    stored = GroupedType("of a test", bits, group=group, scales=FloatType.BFLOAT16)
    planned = Numerics(MatrixKind.AS_STORED, KvDtype.BFLOAT16, FloatType.BFLOAT16)
    saved = planned.weight_bytes(config, {}) - planned.weight_bytes(config, {name: stored})
    assert weights_of(config, stored=stored).linear((name,)).num_bytes == 2 * 256 * 384 - saved


def test_matrices_that_take_the_same_input_have_one_order_of_it():
    """As in files, so that they are one product, which kernels are compiled for."""
    stored = GroupedType("ordered", 4, group=32, scales=FloatType.BFLOAT16, is_ordered=True)
    assert isinstance(LayerReader(weights_of(stored=stored), 0).linear(*QKV), GroupedLinear)


def fields_of(weight):
    return weight.words, weight.scales, weight.zeros, weight.minima, weight.table, weight.order


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

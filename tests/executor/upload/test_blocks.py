"""Blocks of GGUF files stay integers in groups on a device, with the weights that the gguf library makes of them."""

from dataclasses import fields, replace

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from paceline_executor.errors import ModelCorruptError
from paceline_executor.models.layers import DOWN, GATE_UP, OUTPUT, QKV, GroupedLinear, LayerReader, SeparateLinears
from paceline_executor.models.shapes import ShapeWeights
from paceline_executor.models.uploaded import UploadedWeights
from paceline_executor.numerics import KvDtype, MatrixKind, Numerics
from paceline_executor.upload import matrices
from paceline_executor.upload.matrices import Uploader
from paceline_executor.upload.staging import HostTransfer, Staging
from paceline_executor.weights.stored_checkpoint import StoredCheckpoint
from paceline_executor.weights.stored_tensor import FloatType, MemoryBytes, StoredTensor
from paceline_kernels.grouped_linear import unpack_grouped
from random_models import TINY_CONFIG, RandomCheckpoint

CPU = torch.device("cpu")
CONFIG = replace(TINY_CONFIG, hidden_size=256, intermediate_size=256, num_heads=8, head_dim=32, num_layers=1)
SHAPES = CONFIG.tensor_shapes()
NAME = "model.layers.0.mlp.down_proj.weight"
# By type: where a block's numbers of 16 bits are, and the bits of a weight on the device.
BLOCKS = {
    "Q4_0": ([0], 4 + 16 / 32),
    "Q4_1": ([0, 2], 4 + 32 / 32),
    "Q5_0": ([0], 8 + 16 / 32),
    "Q5_1": ([0, 2], 8 + 32 / 32),
    "Q8_0": ([0], 8 + 16 / 32),
    "Q4_K": ([0, 2], 4 + 64 / 32),
    "Q5_K": ([0, 2], 8 + 64 / 32),
    "Q6_K": ([208], 8 + 32 / 16),
}
EACH = pytest.mark.parametrize("kind", BLOCKS)


def random_blocks(kind, shape, heads=0):
    """A matrix of any bits, but finite."""
    numbers, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    generator = np.random.default_rng(len(kind))
    data = generator.integers(0, 256, (shape[0], shape[1] // numbers, num_bytes), np.uint8)
    for at in BLOCKS[kind][0]:
        halves = generator.standard_normal((*data.shape[:2], 1)).astype(np.float16)
        data[:, :, at : at + 2] = halves.view(np.uint8)
    return StoredTensor("of the file", GGMLQuantizationType[kind], shape, MemoryBytes(data.tobytes()), 0, heads)


def uploader_of(staging, *, dtype=torch.float16, **tensors):
    """Of a random checkpoint, but for these tensors."""
    random = RandomCheckpoint(CONFIG)
    stored = {name: random.stored(name) for name in CONFIG.tensor_shapes()} | tensors
    return Uploader(StoredCheckpoint(CONFIG, stored), CPU, dtype, staging)


@pytest.fixture
def staging():
    with Staging(HostTransfer(), 5 << 10, num_readers=2) as buffers:
        yield buffers


@EACH
@pytest.mark.parametrize("heads", [0, 3])
def test_weights_are_those_of_the_library(staging, monkeypatch, kind, heads):
    """Bit for bit, though they come a few rows at a time, whose places are apart where heads are interleaved."""
    monkeypatch.setattr(matrices, "_NUMBERS_AT_ONCE", 2 * 768)
    tensor = random_blocks(kind, (42, 768), heads)
    uploader = uploader_of(staging, **{NAME: tensor})
    (weight,) = uploader.matrix(NAME, kind=MatrixKind.AS_STORED)
    uploader.check()
    expected = gguf.dequantize(tensor.read(), tensor.stored)
    if heads:
        expected = expected.reshape(heads, 7, 2, 768).swapaxes(1, 2).reshape(42, 768)
    assert np.array_equal(unpack_grouped(weight, torch.float32).numpy(), expected)


@EACH
def test_they_take_the_memory_that_was_planned(staging, kind):
    numerics = Numerics(MatrixKind.AS_STORED, KvDtype.FLOAT16, FloatType.FLOAT16)
    (weight,) = uploader_of(staging, **{NAME: random_blocks(kind, (256, 256))}).matrix(NAME, kind=numerics.matrices)
    saved = numerics.weight_bytes(CONFIG, {}) - numerics.weight_bytes(CONFIG, {NAME: GGMLQuantizationType[kind]})
    assert weight.num_bytes == 2 * 256 * 256 - saved == 256 * 256 * BLOCKS[kind][1] / 8


@EACH
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_scale_or_minimum_that_is_not_finite_is_named(staging, kind, value):
    tensor = random_blocks(kind, (40, 256))
    for at in BLOCKS[kind][0]:
        data = bytearray(tensor.source.data)
        start = len(data) - tensor.row_bytes + at
        data[start : start + 2] = np.float16(value).tobytes()
        uploader = uploader_of(staging, **{NAME: replace(tensor, source=MemoryBytes(bytes(data)))})
        uploader.matrix(NAME, kind=MatrixKind.AS_STORED)
        with pytest.raises(ModelCorruptError, match="tensor of the file holds values that are not finite"):
            uploader.check()


def parts_of(linear):
    """What kernels are compiled for: shapes and types of all tensors of a layer, and what else is known of it."""
    if isinstance(linear, SeparateLinears):
        return [parts_of(part) for part in linear.parts]
    weight = linear.weight
    if not isinstance(linear, GroupedLinear):
        return weight.dtype, weight.shape
    found = [getattr(weight, field.name) for field in fields(weight)[1:]]
    return weight.layout, [None if each is None else (each.dtype, each.shape) for each in found]


def test_kernels_are_compiled_for_the_weights_that_arrive(staging):
    """Of a file that mixes types, as those with K-quants do: whatever is alike side by side is one product."""
    kinds = {"q": "Q4_K", "k": "Q4_K", "v": "Q6_K", "gate": "Q4_1", "up": "Q4_1", "down": "Q5_0"}
    names = {name: next((kind for part, kind in kinds.items() if f".{part}_proj" in name), None) for name in SHAPES}
    blocks = {name: random_blocks(kind, SHAPES[name]) for name, kind in names.items() if kind}
    uploader = uploader_of(staging, **blocks)
    stored = uploader._checkpoint.stored_types
    expected = ShapeWeights(CONFIG, torch.float16, MatrixKind.AS_STORED, stored)
    uploaded = UploadedWeights(uploader, MatrixKind.AS_STORED)
    numbers_of_parts = []
    for together in (QKV, OUTPUT, GATE_UP, DOWN):
        ahead, arrived = (LayerReader(weights, 0).linear(*together) for weights in (expected, uploaded))
        assert parts_of(ahead) == parts_of(arrived), together
        numbers_of_parts.append(len(getattr(arrived, "parts", [arrived])))
    assert numbers_of_parts == [2, 1, 1, 1]

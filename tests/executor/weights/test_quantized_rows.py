"""Quantised rows are taken apart as they are stored: put together again they are what the gguf library dequantises."""

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from paceline_executor.errors import ModelCorruptError
from paceline_executor.weights import load_checkpoint
from paceline_executor.weights.quantized_rows import take_apart
from random_models import TINY_CONFIG, RandomCheckpoint, gguf_name, gguf_parts

Q4_0, Q4_1, Q8_0, Q4_K = (GGMLQuantizationType[name] for name in ("Q4_0", "Q4_1", "Q8_0", "Q4_K"))
KINDS = {Q4_0: 4, Q4_1: 4, Q8_0: 8}
BY_KIND = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
MATRICES = [name for name, shape in TINY_CONFIG.tensor_shapes().items() if len(shape) == 2]


def put_together(rows):
    """scale * integer + minimum, as float32; exact in float64 before."""
    minima = 0 * rows.scales if rows.minima is None else rows.minima
    columns = [np.repeat(part.astype(np.float64), 32, axis=1) for part in (rows.scales, minima)]
    return (rows.codes * columns[0] + columns[1]).astype(np.float32)


@BY_KIND
def test_stored_rows_put_together_are_the_dequantised_ones(tmp_path, kind):
    loaded = load_checkpoint(gguf_parts(RandomCheckpoint(), kind).write(tmp_path / "tiny.gguf"))
    for name in MATRICES:
        rows = loaded.quantized(name)
        assert (rows.num_bits, rows.group) == (KINDS[kind], 32)
        assert np.array_equal(put_together(rows), loaded.tensor(name)), name


@pytest.mark.parametrize("kind", [*KINDS, Q4_K], ids=lambda kind: kind.name)
def test_blocks_of_random_bits_are_taken_apart_as_the_library_does(kind):
    """Every integer, and scales of all sizes; what the library adds in float32 may be rounded once."""
    numbers, num_bytes = GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(1).integers(0, 255, (7, 5 * num_bytes), np.uint8)
    data.reshape(7, 5, num_bytes)[:, :, :4] &= 0xBF  # exponents stay below those of infinity and NaN
    rows = take_apart(data, kind)
    assert rows.codes.shape == (7, 5 * numbers)
    assert rows.scales.shape == (7, 5 * numbers // 32)
    expected = gguf.dequantize(data, kind)
    assert np.array_equal(rows.floats() if kind == Q4_K else put_together(rows), expected)


@BY_KIND
def test_integers_and_scales_are_of_their_kind(kind):
    """0 to 15, or any int8; scales and minima are float16 numbers."""
    data = gguf.quantize(np.random.default_rng(1).standard_normal((64, 256), np.float32), kind)
    rows = take_apart(data, kind)
    integer, bounds = (np.uint8, (0, 15)) if kind != Q8_0 else (np.int8, (-127, 127))
    assert rows.codes.dtype == integer
    assert (rows.codes.min(), rows.codes.max()) == bounds
    assert np.array_equal(rows.scales, rows.scales.astype(np.float16))
    if kind != Q8_0:
        assert np.array_equal(rows.minima, rows.minima.astype(np.float16))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q5_0"])
def test_other_types_are_left_to_dequantisation(tmp_path, kind):
    parts = gguf_parts(RandomCheckpoint(), GGMLQuantizationType[kind])
    loaded = load_checkpoint(parts.write(tmp_path / "tiny.gguf"))
    assert all(loaded.quantized(name) is None for name in MATRICES)
    assert loaded.tensor(MATRICES[0]).shape == TINY_CONFIG.tensor_shapes()[MATRICES[0]]


def test_a_name_that_the_model_does_not_have_is_unknown(tmp_path):
    """As `Checkpoint.tensor` says: a tied model has no output matrix of its own."""
    loaded = load_checkpoint(gguf_parts(RandomCheckpoint(), Q8_0).write(tmp_path / "tiny.gguf"))
    with pytest.raises(KeyError):
        loaded.quantized("lm_head.weight")


@pytest.mark.parametrize(("kind", "at"), [(Q4_0, 0), (Q4_1, 0), (Q4_1, 2), (Q8_0, 0)])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_scale_or_minimum_that_is_not_finite_is_refused(tmp_path, kind, at, value):
    parts = gguf_parts(RandomCheckpoint(), kind)
    name = gguf_name("model.layers.0.mlp.down_proj.weight")
    data = parts.tensors[name][0].copy()
    data[5, at : at + 2] = np.array([value], np.float16).view(np.uint8)
    parts.tensors[name] = (data, kind)
    loaded = load_checkpoint(parts.write(tmp_path / "tiny.gguf"))
    with pytest.raises(ModelCorruptError, match=r"blk\.0\.ffn_down\.weight holds values that are not finite"):
        loaded.quantized("model.layers.0.mlp.down_proj.weight")

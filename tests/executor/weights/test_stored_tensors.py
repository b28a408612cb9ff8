"""Stored tensors are the file's bytes, read where they are asked for and nowhere else; float32 is made of them."""

import os
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from paceline_executor.errors import ModelCorruptError
from paceline_executor.weights.gguf.header import read_gguf_header
from paceline_executor.weights.hf.safetensors_folder import _read_header
from paceline_executor.weights.loading import load_checkpoint
from paceline_executor.weights.stored_checkpoint import FLOAT8_NUMBERS, as_float32
from paceline_executor.weights.stored_tensor import FileBytes, FloatType, MemoryBytes, StoredTensor, read_rows_into
from random_models import TINY_CONFIG, RandomCheckpoint, gguf_name, gguf_parts

CONFIG = replace(TINY_CONFIG, head_dim=32, tie_word_embeddings=False)
NAMES = tuple(CONFIG.tensor_shapes())
TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@pytest.fixture(scope="module", params=["F32", "F16", "BF16", "Q8_0", "Q4_1"])
def gguf_model(request, tmp_path_factory):
    """(path, checkpoint) of a file with matrices of this type."""
    parts = gguf_parts(RandomCheckpoint(CONFIG), GGMLQuantizationType[request.param])
    path = parts.write(tmp_path_factory.mktemp("model") / "tiny.gguf")
    return path, load_checkpoint(path)


def test_what_is_stored_in_a_gguf_file_is_said(gguf_model):
    path, checkpoint = gguf_model
    infos = read_gguf_header(path).tensors
    for name in NAMES:
        stored, info = checkpoint.stored(name), infos[gguf_name(name)]
        assert (stored.name, stored.shape, stored.start) == (info.name, info.shape, info.start)
        assert stored.num_bytes == info.num_bytes
        assert isinstance(stored.stored, FloatType) == (info.quantization.name in TYPES)


def test_stored_bytes_are_the_bytes_of_the_gguf_file(gguf_model):
    """In its order: queries and keys of a Llama are interleaved there."""
    path, checkpoint = gguf_model
    content, infos = path.read_bytes(), read_gguf_header(path).tensors
    for name in NAMES:
        info = infos[gguf_name(name)]
        assert checkpoint.stored(name).read().tobytes() == content[info.start : info.start + info.num_bytes]


def test_rows_say_which_of_the_model_they_are(gguf_model):
    _, checkpoint = gguf_model
    for name in NAMES:
        stored, expected = checkpoint.stored(name), checkpoint.tensor(name)
        in_file_order = as_float32(replace(stored, interleaved_heads=0))
        places = stored.place_of_row(np.arange(stored.num_rows))
        assert np.array_equal(expected[places], in_file_order), name


@pytest.mark.parametrize("kind", TYPES)
def test_stored_bytes_are_the_bytes_of_a_safetensors_file(tmp_path, kind):
    """And float32 of them is what torch makes of the same numbers."""
    tensors = {name: torch.randn(5, 3, 2).to(TYPES[kind]) for name in "abc"}
    save_file(tensors, tmp_path / "model.safetensors")
    found = dict(_read_header(tmp_path / "model.safetensors"))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].read().tobytes() == tensor.view(torch.uint8).numpy().tobytes()
        assert np.array_equal(as_float32(found[name]), tensor.float().numpy())


@given(rows=st.integers(1, 9), row_numbers=st.integers(1, 5), first=st.integers(0, 12), count=st.integers(0, 12))
def test_any_rows_can_be_read_by_themselves(rows, row_numbers, first, count):
    """Only those, into memory of the reader; beyond the tensor there is nothing."""
    data = np.random.default_rng(0).integers(0, 255, 7 + rows * row_numbers * 2, np.uint8).tobytes()
    tensor = StoredTensor("t", FloatType.FLOAT16, (rows, row_numbers), MemoryBytes(data), 7)
    buffer = bytearray(count * tensor.row_bytes)
    if first + count > rows:
        with pytest.raises(ValueError, match="are not all of t"):
            read_rows_into(tensor, memoryview(buffer), first)
        return
    read_rows_into(tensor, memoryview(buffer), first)
    assert bytes(buffer) == tensor.read()[first : first + count].tobytes()


def test_rows_are_read_into_the_memory_that_is_given(tmp_path):
    """Nothing is copied on the way: what the system call fills is the caller's memory."""
    (tmp_path / "file").write_bytes(bytes(range(200)))
    tensor = StoredTensor("t", FloatType.FLOAT16, (100,), FileBytes(tmp_path / "file"), 0)
    staging = np.full(300, 255, np.uint8)
    read_rows_into(tensor, memoryview(staging)[100:160], 10)
    assert staging[100:160].tolist() == list(range(20, 80))
    assert (staging[:100] == 255).all()
    assert (staging[160:] == 255).all()


def test_a_file_cut_between_two_reads_is_noticed(tmp_path):
    """Reading raises; a mapping would have killed the process."""
    path = gguf_parts(RandomCheckpoint(CONFIG)).write(tmp_path / "tiny.gguf")
    stored = load_checkpoint(path).stored("lm_head.weight")
    read_rows_into(stored, memoryview(bytearray(stored.row_bytes)), 0)
    os.truncate(path, stored.start + stored.row_bytes // 2)
    with pytest.raises(ModelCorruptError, match=r"tiny\.gguf is damaged: it became shorter"):
        read_rows_into(stored, memoryview(bytearray(stored.row_bytes)), 0)


def test_every_float8_number_is_what_torch_has():
    """All 256, with the sign of zero and both NaN."""
    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(FLOAT8_NUMBERS, theirs, equal_nan=True)
    assert np.array_equal(np.signbit(FLOAT8_NUMBERS), np.signbit(theirs))


@pytest.mark.parametrize("scales", [[0.25], [0.25, 3.0, 1.5]], ids=["one", "a row each"])
def test_float8_numbers_are_multiplied_with_their_scales(scales):
    numbers = torch.randn(3, 4).to(torch.float8_e4m3fn)
    data = MemoryBytes(numbers.view(torch.uint8).numpy().tobytes())
    tensor = StoredTensor("t", FloatType.FLOAT8_E4M3FN, (3, 4), data, 0)
    assert np.array_equal(as_float32(tensor), numbers.float().numpy())
    of_rows = StoredTensor("s", FloatType.FLOAT32, (len(scales), 1), MemoryBytes(np.float32(scales).tobytes()), 0)
    expected = numbers.float() * torch.tensor(scales)[:, None]
    assert np.array_equal(as_float32(replace(tensor, scales=of_rows)), expected.numpy())


def test_a_scale_that_is_not_finite_is_named():
    numbers = StoredTensor("t", FloatType.FLOAT8_E4M3FN, (1, 1), MemoryBytes(bytes(1)), 0)
    scale = StoredTensor("t_scale", FloatType.FLOAT32, (1,), MemoryBytes(np.float32(np.inf).tobytes()), 0)
    with pytest.raises(ModelCorruptError, match="tensor t_scale holds values that are not finite"):
        as_float32(replace(numbers, scales=scale))


def test_blocks_are_measured_as_the_library_does(gguf_model):
    _, checkpoint = gguf_model
    for name in NAMES:
        stored = checkpoint.stored(name)
        if not isinstance(stored.stored, FloatType):
            shape = gguf.quant_shape_to_byte_shape(stored.shape, stored.stored)
            assert (stored.num_rows, stored.row_bytes) == shape

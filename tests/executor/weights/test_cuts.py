"""Parts of stored matrices stand for the same numbers as in the whole, read by a CPU or taken by a device."""

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from paceline_executor.upload.conversion import codes_of
from paceline_executor.weights import load_checkpoint
from paceline_executor.weights.cuts import can_cut_inputs, can_cut_outputs, cut
from paceline_executor.weights.grouped_rows import GroupedTensor
from paceline_executor.weights.stored_checkpoint import as_float32, as_integers
from paceline_executor.weights.stored_tensor import GroupedType, MemoryBytes, StoredTensor, read_rows_into
from quantised_files import CONFIG, VARIANTS, written

MATRICES = [name for name in CONFIG.tensor_shapes() if name.startswith("model.layers.0.") and "proj" in name]


def parts_of(matrix):
    """(outputs, inputs) of parts in the middle and at the end of it."""
    step = next(size for size in (8, 16, 32, 64, 128) if can_cut_inputs(matrix.stored, size) or size == 128)
    cuts = [slice(0, matrix.row_numbers)]
    if can_cut_inputs(matrix.stored, step) and 2 * step <= matrix.row_numbers:
        cuts += [slice(step, 2 * step), slice(step * (matrix.row_numbers // step - 1), matrix.row_numbers)]
    whole, middle = slice(0, matrix.num_rows), slice(8, 24)
    return [(outputs, inputs) for inputs in cuts for outputs in (whole, middle)]


@pytest.mark.parametrize("name", VARIANTS)
def test_parts_of_every_format_are_those_of_the_whole(tmp_path, name):
    files = written(VARIANTS[name])
    checkpoint = load_checkpoint(files.save(tmp_path))
    for tensor in MATRICES:
        whole = checkpoint.stored(tensor)
        assert can_cut_outputs(whole.stored, 16)
        for outputs, inputs in parts_of(whole):
            part = cut(whole, outputs, inputs)
            assert np.array_equal(as_float32(part), files.weights[tensor][outputs, inputs]), (tensor, outputs, inputs)
            if isinstance(part, GroupedTensor):
                octets = np.empty((part.codes.part.num_rows, part.codes.part.row_bytes), np.uint8)
                read_rows_into(part.codes.part, octets.reshape(-1).data, 0)
                on_device = codes_of(torch.from_numpy(octets), part.codes)
                assert np.array_equal(on_device.numpy(), part.codes.read())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"])
def test_parts_of_blocks_are_those_of_the_whole_heads_interleaved_or_not(kind):
    stored = GGMLQuantizationType[kind]
    numbers, num_bytes = GGML_QUANT_SIZES[stored]
    floats = np.random.default_rng(0).standard_normal((32, 4 * numbers), np.float32)
    try:
        data = gguf.quantize(floats, stored)
    except NotImplementedError:  # of these the library only reads
        data = np.tile(np.arange(num_bytes, dtype=np.uint8) & 15, (32, 4))
    for heads in (0, 4):
        whole = StoredTensor("whole", stored, (32, 4 * numbers), MemoryBytes(data.tobytes()), 0, heads)
        values = as_float32(whole)
        for outputs in (slice(0, 32), slice(8, 24)):
            for inputs in (slice(0, 4 * numbers), slice(numbers, 3 * numbers)):
                part = cut(whole, outputs, inputs)
                assert np.array_equal(as_float32(part), values[outputs, inputs])
                integers = as_integers(part)
                assert integers is None or np.array_equal(integers.floats(), values[outputs, inputs])


def test_where_a_matrix_can_be_cut_follows_from_its_type():
    grouped = GroupedType("of a test", 4, group=32)
    assert [can_cut_inputs(grouped, size) for size in (32, 64, 48, 16)] == [True, True, False, False]
    assert not can_cut_inputs(GroupedType("in any order", 4, group=32, is_ordered=True), 32)
    assert [can_cut_inputs(GGMLQuantizationType.Q4_K, size) for size in (256, 128)] == [True, False]
    assert [can_cut_outputs(grouped, size) for size in (8, 12)] == [True, False]
    assert can_cut_inputs(None, 1)
    assert can_cut_outputs(None, 1)

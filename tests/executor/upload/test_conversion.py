"""What torch operations make of stored bytes has the bits that the gguf library gives, on any device."""

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from paceline_executor.errors import UnsupportedModelError
from paceline_executor.upload.conversion import check_convertible, numbers_of
from paceline_executor.weights.stored_checkpoint import floats_of
from paceline_executor.weights.stored_tensor import FloatType, MemoryBytes, StoredTensor

DEQUANTISED = [GGMLQuantizationType[name] for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")]


@pytest.mark.parametrize("kind", DEQUANTISED, ids=lambda kind: kind.name)
def test_blocks_of_random_bits_are_dequantised_as_the_library_does(kind):
    data = np.random.default_rng(1).integers(0, 256, (64, 3 * GGML_QUANT_SIZES[kind][1]), np.uint8)
    with np.errstate(all="ignore"):
        theirs = gguf.dequantize(data, kind)
    ours = numbers_of(torch.from_numpy(data), kind).numpy()
    assert (ours.dtype, ours.shape) == (np.float32, theirs.shape)
    is_nan = np.isnan(theirs)
    assert np.array_equal(np.isnan(ours), is_nan)
    assert np.array_equal(ours.view(np.uint32)[~is_nan], theirs.view(np.uint32)[~is_nan])


@pytest.mark.parametrize("kind", FloatType)
def test_floats_are_what_they_are_on_the_cpu(kind):
    data = np.random.default_rng(2).integers(0, 256, (16, 32), np.uint8)
    rows = torch.from_numpy(data)
    ours = numbers_of(rows, kind)
    assert ours.data_ptr() == rows.data_ptr()
    with np.errstate(invalid="ignore"):
        expected = floats_of(data, kind).reshape(16, -1)
    assert np.array_equal(ours.float().numpy(), expected, equal_nan=True)


@pytest.mark.parametrize("kind", GGMLQuantizationType, ids=lambda kind: kind.name)
def test_another_type_is_refused_by_name(kind):
    tensor = StoredTensor("blk.0.ffn_down.weight", kind, (256, 256), MemoryBytes(b""), 0)
    if kind in DEQUANTISED:
        check_convertible(tensor)
        return
    known = "Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0 are read there"
    with pytest.raises(UnsupportedModelError, match=rf"blk\.0\.ffn_down\.weight is stored as {kind.name}, and {known}"):
        check_convertible(tensor)

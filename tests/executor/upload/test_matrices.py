"""Uploaded tensors are the checkpoint's, whatever the size of the staging buffers, in two buffers of host memory."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st

from paceline_executor.errors import ModelCorruptError, UnsupportedModelError
from paceline_executor.numerics import MatrixKind
from paceline_executor.upload import matrices
from paceline_executor.upload import staging as staging_module
from paceline_executor.upload.matrices import Uploader
from paceline_executor.upload.staging import HostTransfer, Staging
from paceline_executor.weights import load_checkpoint
from paceline_executor.weights.stored_checkpoint import StoredCheckpoint
from paceline_executor.weights.stored_tensor import FloatType, MemoryBytes, StoredTensor
from paceline_kernels.scaled_linear import quantize_rows
from random_models import TINY_CONFIG, RandomCheckpoint, gguf_parts

CPU = torch.device("cpu")
CONFIG = replace(TINY_CONFIG, hidden_size=256, intermediate_size=256, num_heads=8, head_dim=32, qkv_bias=True)
QKV = tuple(f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv")
LARGEST_ROW = 4 * CONFIG.hidden_size
# That streams arrive whole in buffers of any size is shown below by drawn sizes.
BUFFERS = [
    pytest.param(3 * LARGEST_ROW + 5, id="a few rows"),
    pytest.param(LARGEST_ROW, id="a row", marks=pytest.mark.slow),
    pytest.param(1 << 22, id="all", marks=pytest.mark.slow),
]


@pytest.fixture(params=BUFFERS)
def staging(request, monkeypatch):
    """Buffers that hold one row, a few, or everything, filled by three threads wherever there are rows for them."""
    monkeypatch.setattr(staging_module, "_LEAST_PIECE_BYTES", 1)
    with Staging(HostTransfer(), request.param, num_readers=3) as buffers:
        yield buffers


def written(path, kind):
    """A checkpoint in a file with matrices of this type."""
    config = replace(CONFIG, qkv_bias=False)
    return load_checkpoint(gguf_parts(RandomCheckpoint(config), GGMLQuantizationType[kind]).write(path / "tiny.gguf"))


def as_stored(tensors):
    """A checkpoint whose tensors of these names are other ones."""
    random = RandomCheckpoint(CONFIG)
    return StoredCheckpoint(CONFIG, {name: random.stored(name) for name in CONFIG.tensor_shapes()} | tensors)


@pytest.mark.parametrize(
    "kind", ["F32", "Q8_0", "Q4_0", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("F16", "BF16", "Q4_1"))]
)
def test_every_tensor_is_the_checkpoints(tmp_path, staging, kind):
    """In float32 bit for bit; queries and keys, interleaved in the file, in their order."""
    checkpoint = written(tmp_path, kind)
    uploader = Uploader(checkpoint, CPU, torch.float32, staging)
    for name in checkpoint.config.tensor_shapes():
        assert np.array_equal(uploader.dense(name).numpy(), checkpoint.tensor(name)), name
    uploader.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_matrices_become_one_in_the_type_that_is_computed_with(tmp_path, staging, dtype):
    checkpoint = written(tmp_path, "Q8_0")
    fused = Uploader(checkpoint, CPU, dtype, staging).dense(*QKV)
    expected = np.concatenate([checkpoint.tensor(name) for name in QKV])
    assert torch.equal(fused, torch.from_numpy(expected).to(dtype))


def test_biases_become_one(staging):
    checkpoint = RandomCheckpoint(CONFIG)
    names = [name.replace("weight", "bias") for name in QKV]
    fused = Uploader(checkpoint, CPU, torch.float32, staging).dense(*names)
    assert np.array_equal(fused.numpy(), np.concatenate([checkpoint.tensor(name) for name in names]))


@pytest.mark.parametrize("numbers_at_once", [1, 1000, 1 << 20])
def test_parts_rounded_to_float8_are_the_whole_matrix_rounded(staging, monkeypatch, numbers_at_once):
    monkeypatch.setattr(matrices, "_NUMBERS_AT_ONCE", numbers_at_once)
    checkpoint = RandomCheckpoint(CONFIG)
    found = Uploader(checkpoint, CPU, torch.bfloat16, staging).matrix(*QKV, kind=MatrixKind.FLOAT8)
    whole = torch.from_numpy(np.concatenate([checkpoint.tensor(name) for name in QKV]))
    expected = quantize_rows(whole, torch.float8_e4m3fn)
    assert torch.equal(found.values.view(torch.uint8), expected.values.view(torch.uint8))
    assert torch.equal(found.scales, expected.scales)
    assert torch.equal(found.scales, whole.abs().amax(1) / 448)


def float8_tensor(name, scales):
    """A stored matrix of random float8 numbers with these scales, and what it is in float32."""
    shape = CONFIG.tensor_shapes()[name]
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(len(name))).to(torch.float8_e4m3fn)
    stored_scales = StoredTensor("s", FloatType.FLOAT32, tuple(scales.shape), MemoryBytes(scales.numpy().tobytes()), 0)
    data = MemoryBytes(numbers.view(torch.uint8).numpy().tobytes())
    stored = StoredTensor(name, FloatType.FLOAT8_E4M3FN, shape, data, 0, scales=stored_scales)
    return stored, numbers.float() * scales.reshape(-1, 1)


def float8_checkpoint():
    """(checkpoint, what its queries, keys and values are): one has a scale, one a scale per row, one is of float32."""
    rows = CONFIG.tensor_shapes()[QKV[1]][0]
    queries, expected_queries = float8_tensor(QKV[0], torch.tensor([0.5]))
    keys, expected_keys = float8_tensor(QKV[1], torch.linspace(0.1, 2, rows)[:, None])
    checkpoint = as_stored({QKV[0]: queries, QKV[1]: keys})
    values = torch.from_numpy(checkpoint.tensor(QKV[2]))
    return checkpoint, torch.cat((expected_queries, expected_keys, values))


@pytest.mark.parametrize("kind", [MatrixKind.AS_STORED, MatrixKind.FLOAT8])
def test_stored_float8_stays_as_it_is(staging, kind):
    """With its scales, one per row afterwards; what is fused with it becomes float8."""
    checkpoint, expected = float8_checkpoint()
    found = Uploader(checkpoint, CPU, torch.bfloat16, staging).matrix(*QKV, kind=kind)
    product = found.values.float() * found.scales[:, None]
    num_kept = sum(checkpoint.stored(name).num_rows for name in QKV[:2])
    assert torch.equal(product[:num_kept], expected[:num_kept])
    torch.testing.assert_close(product[num_kept:], expected[num_kept:], rtol=2**-4, atol=1e-3)


def test_stored_float8_becomes_dense_where_the_device_has_none(staging):
    checkpoint, expected = float8_checkpoint()
    found = Uploader(checkpoint, CPU, torch.bfloat16, staging).matrix(*QKV, kind=MatrixKind.DENSE)
    assert torch.equal(found, expected.bfloat16())


def test_what_is_stored_in_floats_stays_dense(staging):
    """Unless float8 is asked for."""
    found = Uploader(RandomCheckpoint(CONFIG), CPU, torch.float16, staging).matrix(*QKV, kind=MatrixKind.AS_STORED)
    assert found.dtype == torch.float16


@pytest.mark.parametrize("kind", MatrixKind)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_named(staging, kind, value):
    values = RandomCheckpoint(CONFIG).tensor(QKV[1])
    values[17, 3] = value
    spoilt = StoredTensor("the keys", FloatType.FLOAT32, values.shape, MemoryBytes(values.tobytes()), 0)
    uploader = Uploader(as_stored({QKV[1]: spoilt}), CPU, torch.bfloat16, staging)
    uploader.matrix(*QKV, kind=kind)
    with pytest.raises(ModelCorruptError, match="tensor the keys holds values that are not finite"):
        uploader.check()


def test_a_float8_nan_is_named(staging):
    """The only float8 numbers that are not finite are the two NaN."""
    stored, _ = float8_tensor(QKV[0], torch.ones(1))
    data = bytearray(stored.source.data)
    data[5] = 0xFF
    spoilt = replace(stored, source=MemoryBytes(bytes(data)))
    uploader = Uploader(as_stored({QKV[0]: spoilt}), CPU, torch.bfloat16, staging)
    uploader.matrix(QKV[0], kind=MatrixKind.AS_STORED)
    with pytest.raises(ModelCorruptError, match=r"q_proj\.weight holds values that are not finite"):
        uploader.check()


def test_a_number_beyond_float16_is_named(staging):
    """It would be an infinity there."""
    values = np.full(CONFIG.hidden_size, 1e6, np.float32)
    norm = StoredTensor("norm", FloatType.FLOAT32, values.shape, MemoryBytes(values.tobytes()), 0)
    uploader = Uploader(as_stored({"model.norm.weight": norm}), CPU, torch.float16, staging)
    uploader.dense("model.norm.weight")
    with pytest.raises(ModelCorruptError, match="tensor norm holds values that are not finite"):
        uploader.check()


def test_a_type_that_no_device_dequantises_is_refused_before_anything_is_read(tmp_path, staging):
    with pytest.raises(UnsupportedModelError, match="is stored as MXFP4"):
        Uploader(written(tmp_path, "MXFP4"), CPU, torch.bfloat16, staging)


@pytest.mark.parametrize("kind", [MatrixKind.DENSE, MatrixKind.AS_STORED])
def test_progress_counts_every_byte(tmp_path, staging, kind):
    """Up to all of them, never back."""
    checkpoint, told = written(tmp_path, "Q8_0"), []
    uploader = Uploader(checkpoint, CPU, torch.float32, staging, lambda done, total: told.append((done, total)))
    for name in checkpoint.config.tensor_shapes():
        _ = uploader.matrix(name, kind=kind) if "_proj" in name else uploader.dense(name)
    total = sum(checkpoint.stored(name).num_bytes for name in checkpoint.config.tensor_shapes())
    done = [done for done, _ in told]
    assert {total for _, total in told} == {total}
    assert done == sorted(done)
    assert done[-1] == total


class Fence:
    """Whether the device has taken what was sent."""

    def __init__(self):
        self.is_taken = False

    def synchronize(self):
        """As `Sent` has it."""
        self.is_taken = True


class DistantTransfer:
    """A device that takes bytes late: until somebody waits, the host's memory must stay as it is."""

    def __init__(self):
        self.buffer_sizes, self.in_transfer = [], []

    def new_buffer(self, num_bytes):
        """Host memory whose size is noted."""
        self.buffer_sizes.append(num_bytes)
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def send(self, part):
        """Look at all that is on its way, then take a copy."""
        for fence, memory, sent in self.in_transfer:
            assert fence.is_taken or torch.equal(memory, sent), "a buffer was filled before the device had taken it"
        fence = Fence()
        self.in_transfer.append((fence, part, part.clone()))
        return part.clone(), fence


def test_a_buffer_is_filled_again_only_when_the_device_has_taken_it():
    """Two are in turn, so that one is read into while the other is sent; at the end all are taken."""
    checkpoint, transfer = RandomCheckpoint(CONFIG), DistantTransfer()
    with Staging(transfer, 2 * LARGEST_ROW, num_readers=2) as staging:
        found = Uploader(checkpoint, CPU, torch.float32, staging).dense(*QKV)
        assert not transfer.in_transfer[-2][0].is_taken  # nobody waits for what is not in the way
    assert np.array_equal(found.numpy(), np.concatenate([checkpoint.tensor(name) for name in QKV]))
    assert all(fence.is_taken for fence, _, _ in transfer.in_transfer)


@given(
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 64)), min_size=1, max_size=4),
    spare=st.integers(0, 300),
    num_readers=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_whatever_is_streamed_arrives_whole_and_in_order(shapes, spare, num_readers, seed):
    transfer = DistantTransfer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging_module, "_LEAST_PIECE_BYTES", 32)
        with Staging(transfer, max(width for _, width in shapes) + spare, num_readers) as staging:
            for shape in shapes:
                data = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
                stored = StoredTensor("w", FloatType.FLOAT8_E4M3FN, shape, MemoryBytes(data.tobytes()), 0)
                parts = [(first, part.clone().numpy()) for first, part in staging.stream(stored)]
                assert [first for first, _ in parts] == np.cumsum([0, *(len(part) for _, part in parts)])[:-1].tolist()
                assert np.array_equal(np.concatenate([part for _, part in parts]), data)
    assert all(fence.is_taken for fence, _, _ in transfer.in_transfer[-2:])


@pytest.mark.parametrize("stored", ["F16", "Q8_0"])
def test_the_host_holds_two_buffers_and_no_second_copy_of_the_model(tmp_path, stored):
    path = written(tmp_path, stored)._tensors[QKV[0]].source.path
    buffer_bytes, transfer = 8 << 10, DistantTransfer()
    assert path.stat().st_size > 100 * buffer_bytes
    checkpoint = load_checkpoint(path)
    tracemalloc.start()
    try:
        with Staging(transfer, buffer_bytes, num_readers=2) as staging:
            uploader = Uploader(checkpoint, CPU, torch.bfloat16, staging)
            transfer.in_transfer = NoMemory()
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            uploader.matrix(*QKV, kind=MatrixKind.AS_STORED)
            peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert transfer.buffer_sizes == [buffer_bytes, buffer_bytes]
    assert peak < 8 * buffer_bytes < sum(checkpoint.stored(name).num_bytes for name in QKV)


class NoMemory(list):
    """What a transfer that remembers nothing remembers."""

    def append(self, _item):
        """Forget it."""

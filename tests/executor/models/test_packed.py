"""The packed Llama model: what it packs is what the file holds, and its logits are near those in float32."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType

from model_inputs import Row, inputs_of
from paceline_executor.models.interface import KvCache
from paceline_executor.models.layers import HostWeights
from paceline_executor.models.llama import LlamaModel
from paceline_executor.models.packed_llama import PackedLlamaModel
from paceline_executor.models.packed_matrix import read_packed
from paceline_executor.weights import load_checkpoint
from paceline_executor.weights.grouped_rows import GroupedRows
from paceline_kernels.quantized_linear import WeightFormat, unpack_rows
from random_models import TINY_CONFIG, RandomCheckpoint, gguf_name, gguf_parts

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
    packed = read_packed(checkpoint, QKV).weight
    assert packed.format == weight_format
    assert np.array_equal(unpacked(packed), np.concatenate([checkpoint.tensor(name) for name in QKV]))


def test_matrices_stored_in_different_ways_become_int8_together(tmp_path):
    """Those of 8 bits keep every bit; the others are off by half of a 127th of their group's largest at most."""
    checkpoint = written(tmp_path, Q4_1, {"k_proj": Q8_0, "v_proj": F16})
    packed = read_packed(checkpoint, QKV).weight
    queries, keys, values = np.split(unpacked(packed), [4 * 32, 6 * 32])
    assert packed.format == WeightFormat.INT8
    assert np.array_equal(keys, checkpoint.tensor(QKV[1]))
    for found, name in ((queries, QKV[0]), (values, QKV[2])):
        wanted = checkpoint.tensor(name)
        largest = np.abs(wanted).reshape(-1, 32).max(axis=1)
        errors = np.abs(found - wanted).reshape(-1, 32).max(axis=1)
        assert (errors <= largest / 253).all()  # not 254: the scale is rounded up to a float16


WEIGHTS = {
    "symmetric": {"zeros": None},
    "zero points": {},
    "zero points of 8 bits": {"num_bits": 8},
    "spans of two groups, the last cut off": {"group": 64},
    "whole rows": {"group": 96},
    "act order": {"is_ordered": True},
    "act order, spans of two groups": {"group": 64, "is_ordered": True},
}


def grouped(num_rows, *, num_bits=4, group=32, is_ordered=False, zeros=(0, 16), seed=0):
    """Rows of 96 inputs with scales that float16 holds."""
    generator = np.random.default_rng(seed)
    num_groups = -(-96 // group)
    order = generator.permutation(np.arange(96) // group) if is_ordered else None
    offset = 0 if num_bits == 4 else 120
    return GroupedRows(
        num_bits,
        (generator.integers(0, 16, (num_rows, 96)) + offset).astype(np.uint8),
        generator.uniform(0.1, 1, (num_rows, num_groups)).astype(np.float16).astype(np.float32),
        group,
        zeros=None
        if zeros is None
        else (generator.integers(*zeros, (num_rows, num_groups)) + offset).astype(np.float32),
        order=order,
    )


@pytest.mark.parametrize("asked", WEIGHTS.values(), ids=WEIGHTS)
def test_codes_of_groups_are_packed_as_they_are(asked):
    """Of two matrices with the same inputs, whose outputs come in another order; nothing is rounded."""
    parts, rows = [grouped(20, **asked), grouped(12, **asked)], np.arange(11, -1, -1)
    parts[0] = parts[0].of_rows(slice(12))
    stored = dict(zip("ab", parts, strict=True))
    checkpoint = SimpleNamespace(quantized=stored.__getitem__, tensor=None)
    packed = read_packed(checkpoint, ("a", "b"), (rows, rows))
    expected = np.concatenate([part.floats()[rows] for part in parts])
    found = unpacked(packed.weight)
    assert packed.in_8_bits == ()
    assert (packed.order is None) != asked.get("is_ordered", False)
    assert np.array_equal(found, expected if packed.order is None else expected[:, packed.order.numpy()])


def test_matrices_whose_groups_differ_become_int8_and_are_named():
    parts = {"a": grouped(8, group=64), "b": grouped(8), "c": grouped(8, is_ordered=True)}
    checkpoint = SimpleNamespace(quantized=parts.__getitem__, tensor=lambda name: parts[name].floats())
    packed = read_packed(checkpoint, tuple(parts))
    assert packed.weight.format == WeightFormat.INT8
    assert packed.in_8_bits == ("a", "b", "c")
    wanted = np.concatenate([part.floats() for part in parts.values()])
    assert np.abs(unpacked(packed.weight) - wanted).max() <= np.abs(wanted).max() / 253


def test_a_file_of_many_types_is_computed(tmp_path):
    """Files of 4 bits per weight hold a few matrices in more."""
    checkpoint = written(tmp_path, Q4_1, {"down_proj": Q8_0, "v_proj": Q8_0, "embed_tokens": Q8_0, "lm_head": F16})
    exact = logits_of(LlamaModel(HostWeights(checkpoint), LENGTH), torch.float32)
    packed = logits_of(PackedLlamaModel(checkpoint, LENGTH), torch.float16)
    assert (packed - exact).square().mean().sqrt() < 0.05 * exact.std()


# Prints in bytes what the weights are, what more memory they take than before, and took at the most meanwhile.
LOADING = """
import sys
from pathlib import Path
from paceline_executor.numerics import KvDtype, MatrixKind, Numerics
from paceline_executor.runner.cpu import CpuModel
from paceline_executor.runner.device.host_device import HostDevice
from paceline_executor.weights import load_checkpoint

def taken(name):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(name))

small, large = (load_checkpoint(Path(path)) for path in sys.argv[1:])
device, numerics = HostDevice(1), Numerics(MatrixKind.PACKED, KvDtype.INT8)
CpuModel.read(device, small, numerics, 64)
Path("/proc/self/clear_refs").write_text("5")
before = taken("VmRSS")
model = CpuModel.read(device, large, numerics, 64)
print(model.weight_bytes, taken("VmRSS") - before, taken("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells how much memory a process takes")
def test_loading_takes_the_packed_bytes_and_two_float32_matrices_at_most(tmp_path, monkeypatch):
    for name in ("small", "large"):
        (tmp_path / name).mkdir()
    small = written(tmp_path / "small", F16)
    monkeypatch.setattr(sys.modules[__name__], "CONFIG", replace(CONFIG, vocab_size=20_000, hidden_size=512))
    large = written(tmp_path / "large", F16)
    paths = [str(checkpoint.stored("model.norm.weight").source.path) for checkpoint in (small, large)]
    printed = subprocess.run([sys.executable, "-c", LOADING, *paths], check=True, capture_output=True, text=True).stdout
    packed, kept, most = map(int, printed.split())
    assert 0.95 * packed < kept < 1.15 * packed  # pages that the small one left are taken again
    assert most < kept + CONFIG.vocab_size * CONFIG.hidden_size * 8

"""Every family of dense models on a device: its kernels, interpreted, give the logits that the CPU has in float32.

In `make test` each part of a model is in one case: Gemma 3 has most, Gemma 2 its caps, a Llama of float8 the biases,
Qwen 3 keys and values of 8 bits.
"""

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType

from interpreted_models import (
    DEVICE,
    MAX_MODEL_LEN,
    all_steps,
    assert_close,
    average,
    computed_in,
    config_of,
    errors,
    logits_of,
    on_cpu,
    on_device,
    two_steps,
)
from joined_ranks import JoinedCollectives
from kernel_rig.turns import Turns
from paceline_executor.errors import ModelCorruptError, UnsupportedModelError
from paceline_executor.models import layers
from paceline_executor.models.registry import upload_model
from paceline_executor.numerics import MatrixKind
from paceline_executor.weights import load_checkpoint
from paceline_executor.weights.sharded import ShardedCheckpoint
from paceline_executor.weights.stored_checkpoint import StoredCheckpoint
from paceline_executor.weights.stored_tensor import FloatType, MemoryBytes, StoredTensor
from paceline_kernels.devices import cpu_stands_for_gpu
from paceline_kernels.linear import Splits
from paceline_kernels.scaled_linear import quantize_rows
from quantised_files import VARIANTS, written
from random_models import FAMILY_CONFIGS, RandomCheckpoint, gguf_parts, tiny_checkpoint

if importlib.util.find_spec("triton") is None:  # it is for Linux
    pytest.skip("needs Triton", allow_module_level=True)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.usefixtures("ieee_arithmetic"),
]


def families_of(*chosen):
    """Those of `make test`, and the others."""
    return [pytest.param(name, marks=[] if name in chosen else [pytest.mark.slow]) for name in FAMILY_CONFIGS]


@pytest.mark.parametrize("family", families_of("gemma3"))
def test_logits_are_those_of_the_cpu(family):
    checkpoint, batches = RandomCheckpoint(config_of(family)), all_steps()
    assert_close(on_device(checkpoint, torch.float32, batches), on_cpu(checkpoint, batches), torch.float32)


@pytest.mark.parametrize("family", families_of("gemma2"))
def test_in_16_bits_logits_are_near_those_of_the_cpu(family):
    """Off by what rounding every result to eleven bits costs."""
    checkpoint, batches = RandomCheckpoint(config_of(family)), two_steps()
    assert_close(on_device(checkpoint, torch.float16, batches), on_cpu(checkpoint, batches), torch.float16)


def float8_checkpoint(config):
    """Random weights that are stored as float8 with a scale per row, but for norms, biases and the embedding."""
    random, tensors = RandomCheckpoint(config), {}
    for name, shape in config.tensor_shapes().items():
        tensors[name] = random.stored(name)
        if len(shape) == 2 and "embed" not in name:
            weight = quantize_rows(torch.from_numpy(random.tensor(name)), torch.float8_e4m3fn)
            scales = MemoryBytes(weight.scales.numpy().tobytes())
            tensors[name] = StoredTensor(
                name,
                FloatType.FLOAT8_E4M3FN,
                shape,
                MemoryBytes(weight.values.view(torch.uint8).numpy().tobytes()),
                0,
                scales=StoredTensor(f"{name}_scale", FloatType.FLOAT32, (shape[0], 1), scales, 0),
            )
    return StoredCheckpoint(config, tensors)


@pytest.mark.parametrize("kind", [pytest.param(MatrixKind.DENSE, marks=pytest.mark.slow), MatrixKind.AS_STORED])
def test_stored_float8_is_computed_with(kind):
    """As float8, or made dense: the CPU reads the same numbers, so float32 agrees. Layers of a Llama are alike."""
    checkpoint, batches = float8_checkpoint(replace(config_of("llama"), num_layers=1)), two_steps()
    assert_close(on_device(checkpoint, torch.float32, batches, kind), on_cpu(checkpoint, batches), torch.float32)


@pytest.mark.parametrize(
    "name",
    [
        "awq",
        "w8a8",
        "fp8 blocks, scales by their exponents",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gptq asym act order g64", "nf4")),
    ],
)
def test_a_model_of_grouped_weights_computes_what_the_cpu_does(tmp_path, name):
    """The same numbers in float32, by the kernels of a GPU."""
    checkpoint = load_checkpoint(written(VARIANTS[name]).save(tmp_path))
    batches = [replace(step, token_ids=step.token_ids % checkpoint.config.vocab_size) for step in two_steps()]
    assert_close(on_device(checkpoint, torch.float32, batches), on_cpu(checkpoint, batches), torch.float32)


def test_a_model_of_blocks_computes_what_the_cpu_does(tmp_path):
    """Of two types side by side; rows of queries and keys are interleaved in the file."""
    parts, q8_0 = gguf_parts(RandomCheckpoint(), GGMLQuantizationType.Q4_1), GGMLQuantizationType.Q8_0
    values = RandomCheckpoint().tensor("model.layers.1.self_attn.v_proj.weight")
    parts.tensors["blk.1.attn_v.weight"] = gguf.quantize(values, q8_0), q8_0
    checkpoint = load_checkpoint(parts.write(tmp_path / "tiny.gguf"))
    assert_close(on_device(checkpoint, torch.float32, two_steps()), on_cpu(checkpoint, two_steps()), torch.float32)


def test_rows_by_int8_are_rounded_on_the_way_and_cost_what_rounding_does(tmp_path, monkeypatch):
    """By norms and gates where these write them; in float32 the bits are those of rows rounded by the product."""
    monkeypatch.setattr("paceline_kernels.scaled_linear.triton.ROUNDED_FROM_ROWS", 4)
    checkpoint = load_checkpoint(written(VARIANTS["w8a8"]).save(tmp_path))
    batches = [replace(step, token_ids=step.token_ids % checkpoint.config.vocab_size) for step in two_steps()]
    found = on_device(checkpoint, torch.float32, batches)
    assert 1e-4 < average(errors(found, on_cpu(checkpoint, batches))) < 0.02
    from paceline_kernels.scaled_linear.triton import round_rows

    seen = []
    for name in ("rms_norm", "gate_and_multiply"):
        fused, parted = getattr(layers, f"{name}_rounded"), getattr(layers, name)

        def apart(*arguments, parted=parted, fused=fused, **of_norm):
            seen.append(fused)
            return round_rows(parted(*[a for a in arguments if a is not torch.int8], **of_norm), torch.int8)

        monkeypatch.setattr(layers, f"{name}_rounded", apart)
    assert torch.equal(on_device(checkpoint, torch.float32, batches), found)
    assert len(seen) == 3 * checkpoint.config.num_layers  # of the first step; the second one has two rows


@pytest.mark.slow
def test_float8_made_from_floats_is_the_float8_of_a_file():
    """A row's scale is its largest number by 448, in both."""
    config, batches = config_of("llama"), two_steps()
    found = on_device(RandomCheckpoint(config), torch.float32, batches, MatrixKind.FLOAT8)
    assert_close(found, on_cpu(float8_checkpoint(config), batches), torch.float32)
    assert average(errors(found, on_cpu(RandomCheckpoint(config), batches))) < 0.06


@pytest.mark.parametrize(
    ("kv_dtype", "most"),
    [(torch.int8, 0.02), pytest.param(torch.float8_e4m3fn, 0.06, marks=pytest.mark.slow)],
    ids=str,
)
def test_keys_and_values_of_8_bits_cost_what_rounding_does(kv_dtype, most):
    """With their scales; a scale left out costs the logits themselves."""
    checkpoint, batches = RandomCheckpoint(config_of("qwen3")), two_steps()
    found = on_device(checkpoint, torch.float32, batches, kv_dtype=kv_dtype)
    assert 1e-4 < average(errors(found, on_cpu(checkpoint, batches))) < most


def first_row(inputs):
    """The batch without its other rows; each row has one token."""
    columns = ("token_ids", "positions", "slot_mapping", "context_lens", "block_tables", "logit_tokens")
    return replace(inputs, cu_seqlens=inputs.cu_seqlens[:2], **{name: getattr(inputs, name)[:1] for name in columns})


@pytest.mark.slow
def test_with_fixed_splits_a_tokens_bits_do_not_depend_on_its_mates(monkeypatch):
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: np.einsum("ik,kj->ij", a, b, dtype=dtype))
    checkpoint = RandomCheckpoint(config_of("gemma2"))
    chunks, decodes = two_steps(Splits.FIXED)
    together = on_device(checkpoint, torch.float16, [chunks, decodes])[-2]
    alone = on_device(checkpoint, torch.float16, [chunks, first_row(decodes)])[-1]
    assert torch.equal(alone, together)


def test_weights_that_are_not_finite_are_refused_by_name():
    config = config_of("mistral")
    random = RandomCheckpoint(config)
    values = np.full(config.hidden_size, np.nan, np.float32)
    tensors = {name: random.stored(name) for name in config.tensor_shapes()}
    tensors["model.norm.weight"] = StoredTensor(
        "norm", FloatType.FLOAT32, values.shape, MemoryBytes(values.tobytes()), 0
    )
    with pytest.raises(ModelCorruptError, match="tensor norm holds values that are not finite"):
        upload_model(StoredCheckpoint(config, tensors), DEVICE, MAX_MODEL_LEN, computed_in(torch.float16))


def test_an_unknown_architecture_is_refused_by_name():
    told = []
    with pytest.raises(UnsupportedModelError, match="'mamba' is not supported"):
        upload_model(
            tiny_checkpoint(architecture="mamba"),
            DEVICE,
            MAX_MODEL_LEN,
            computed_in(torch.float16),
            lambda done, _total: told.append(done),
        )
    assert told == []


def test_with_fixed_splits_two_ranks_have_the_bits_of_one():
    """In 16 bits: what is summed over ranks is not rounded before."""
    checkpoint, turns = RandomCheckpoint(FAMILY_CONFIGS["llama"]), Turns(2)
    batches = two_steps(Splits.FIXED)
    alone = on_device(checkpoint, torch.float16, batches, MatrixKind.DENSE)
    numerics = computed_in(torch.float16)

    def of_rank(rank):
        part, sums = ShardedCheckpoint(checkpoint, rank, 2), JoinedCollectives(turns, rank)
        with turns.turn():
            model = upload_model(part, DEVICE, MAX_MODEL_LEN, numerics, collectives=sums)
            return logits_of(model, part.config, torch.float16, batches)

    with cpu_stands_for_gpu(), ThreadPoolExecutor(2) as ranks:
        assert all(torch.equal(logits.float(), alone) for logits in ranks.map(of_rank, range(2)))

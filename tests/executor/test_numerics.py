"""In which numbers a model is computed: what the options come to, what they refuse, and what the numbers cost.

On a CPU, and on a GPU by checkpoint and capability.
"""

import math
from dataclasses import replace

import pytest
import torch
from gguf.constants import GGMLQuantizationType

from paceline_executor.config import parse_config
from paceline_executor.errors import DrafterError, LimitError, UnsupportedModelError
from paceline_executor.models.layers import HostWeights
from paceline_executor.models.registry import upload_model
from paceline_executor.models.rope import rotation_bytes
from paceline_executor.numerics import (
    FLOAT32_NUMERICS,
    KvDtype,
    MatrixKind,
    Numerics,
    Quantization,
    choose_cpu_numerics,
    choose_gpu_numerics,
    choose_twin_numerics,
)
from paceline_executor.weights.checkpoint import Rope
from paceline_executor.weights.stored_tensor import FloatType
from random_models import FAMILY_CONFIGS, TINY_CONFIG, RandomCheckpoint

A100, L4, H100 = (8, 0), (8, 9), (9, 0)
# Sizes that groups of 32 divide, as those of all common models; the tiny one's heads have 16 dimensions.
WIDE = replace(TINY_CONFIG, head_dim=32)
PACKED_FLOAT16 = Numerics(MatrixKind.PACKED, KvDtype.FLOAT16)
PACKED_INT8 = Numerics(MatrixKind.PACKED, KvDtype.INT8)
DEVICE_SLOTS = {KvDtype.BFLOAT16: 64, KvDtype.FLOAT16: 64, KvDtype.INT8: 36, KvDtype.FP8_E4M3: 32}


@pytest.mark.parametrize(
    ("numerics", "slot"),
    [
        (FLOAT32_NUMERICS, 128),
        (PACKED_FLOAT16, 64),
        (PACKED_INT8, 36),
        *((Numerics(MatrixKind.DENSE, kv, FloatType.BFLOAT16), slot) for kv, slot in DEVICE_SLOTS.items()),
    ],
)
def test_a_token_takes_its_keys_and_values_in_all_layers(numerics, slot):
    """Two layers, two KV heads, 32 dimensions; an int8 slot has a scale of four bytes."""
    assert numerics.bytes_per_token(WIDE) == 2 * 2 * 2 * slot


@pytest.mark.parametrize(
    ("quantization", "kv_dtype", "numerics"),
    [
        (Quantization.AUTO, None, PACKED_INT8),
        (Quantization.AUTO, KvDtype.FLOAT16, PACKED_FLOAT16),
        (Quantization.AUTO, KvDtype.INT8, PACKED_INT8),
        (Quantization.NONE, None, FLOAT32_NUMERICS),
        (Quantization.NONE, KvDtype.FLOAT32, FLOAT32_NUMERICS),
    ],
)
def test_options_that_go_together_are_followed(quantization, kv_dtype, numerics):
    """Packed weights and int8 keys and values, unless something else is asked for."""
    assert choose_cpu_numerics(quantization, kv_dtype, WIDE, 16) == numerics


@pytest.mark.parametrize(("block_size", "head_dim"), [(8, 32), (24, 32), (1, 32), (16, 544)])
def test_keys_and_values_are_float16_where_blocks_or_heads_do_not_allow_int8(block_size, head_dim):
    """Asked for int8, the sentence says what that needs."""
    model = replace(WIDE, head_dim=head_dim)
    assert choose_cpu_numerics(Quantization.AUTO, None, model, block_size) == PACKED_FLOAT16
    with pytest.raises(LimitError, match=f"--block-size that 16 divides .* not {block_size} and {head_dim}"):
        choose_cpu_numerics(Quantization.AUTO, KvDtype.INT8, model, block_size)


@pytest.mark.parametrize("size", ["hidden_size", "intermediate_size", "head_dim"])
@pytest.mark.parametrize("kv_dtype", [None, KvDtype.FLOAT32])
def test_a_model_whose_sizes_groups_do_not_divide_is_computed_in_float32(size, kv_dtype):
    """Groups have 32 inputs."""
    odd = replace(WIDE, **{size: 80})
    assert choose_cpu_numerics(Quantization.AUTO, kv_dtype, odd, 16) == FLOAT32_NUMERICS


@pytest.mark.parametrize("kv_dtype", [KvDtype.FLOAT16, KvDtype.INT8])
def test_small_keys_beside_float32_weights_are_refused(kv_dtype):
    """The sentence names what leads to float32, the option or the model's sizes, and what to leave out."""
    with pytest.raises(LimitError, match=f"--quantization none .* leave --kv-cache-dtype {kv_dtype.value} out"):
        choose_cpu_numerics(Quantization.NONE, kv_dtype, WIDE, 16)
    with pytest.raises(LimitError, match=rf"sizes \(64, 96, 16\) .* leave --kv-cache-dtype {kv_dtype.value} out"):
        choose_cpu_numerics(Quantization.AUTO, kv_dtype, TINY_CONFIG, 16)


def test_float32_keys_beside_packed_weights_are_refused():
    with pytest.raises(LimitError, match="--kv-cache-dtype float32 needs --quantization none"):
        choose_cpu_numerics(Quantization.AUTO, KvDtype.FLOAT32, WIDE, 16)


def test_a_weight_takes_four_bytes_or_one_and_its_part_of_a_scale():
    """Groups of 32 share a float16."""
    assert FLOAT32_NUMERICS.max_bytes_per_weight() == 4
    assert PACKED_INT8.max_bytes_per_weight() * 32 == 34


@pytest.mark.parametrize(
    ("arguments", "quantization", "kv_dtype"),
    [
        ([], Quantization.AUTO, None),
        (["--quantization", "none", "--kv-cache-dtype", "auto"], Quantization.NONE, None),
        (["--quantization", "auto", "--kv-cache-dtype", "int8"], Quantization.AUTO, KvDtype.INT8),
        (["--kv-cache-dtype", "float16"], Quantization.AUTO, KvDtype.FLOAT16),
        (["--kv-cache-dtype", "float32"], Quantization.AUTO, KvDtype.FLOAT32),
    ],
)
def test_options_are_read_as_written(arguments, quantization, kv_dtype):
    config = parse_config(arguments)
    assert (config.quantization, config.kv_cache_dtype) == (quantization, kv_dtype)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--quantization", "int4"], "'int4' is not one of auto, none"),
        (["--kv-cache-dtype", "fp8"], "float32, float16, int8"),
    ],
)
def test_an_option_that_means_nothing_is_refused_with_what_there_is(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse_config(arguments)
    assert exit_info.value.code == 2
    assert sentence in capsys.readouterr().err


# Of a GPU


def stored_as(kind):
    """A checkpoint whose matrices are of this type, its norms bfloat16 beside float8."""
    dense = FloatType.BFLOAT16 if kind is FloatType.FLOAT8_E4M3FN else kind
    return {name: kind if name.endswith("_proj.weight") else dense for name in WIDE.tensor_shapes()}


BFLOAT16, FLOAT16 = stored_as(FloatType.BFLOAT16), stored_as(FloatType.FLOAT16)
FLOAT8, Q4_K = stored_as(FloatType.FLOAT8_E4M3FN), stored_as(GGMLQuantizationType.Q4_K)


def test_a_copy_of_a_model_has_float8_matrices_where_that_is_smaller_and_multiplied():
    target = choose(kv=KvDtype.INT8)
    copy = target.rounded(BFLOAT16, H100)
    assert copy == Numerics(MatrixKind.FLOAT8, KvDtype.BFLOAT16, FloatType.BFLOAT16)
    assert copy.weight_bytes(WIDE, BFLOAT16) < 0.7 * target.weight_bytes(WIDE, BFLOAT16)
    for quantization, stored in ((Quantization.FP8, BFLOAT16), (Quantization.AUTO, FLOAT8), (Quantization.AUTO, Q4_K)):
        with pytest.raises(DrafterError, match="matrices are of 4 or 8 bits already: name a smaller model"):
            choose(quantization, stored=stored).rounded(stored, H100)
    with pytest.raises(DrafterError, match=r"target_copy needs compute capability 8\.9, and this GPU has 8\.0"):
        choose(capability=A100).rounded(BFLOAT16, A100)
    assert choose(Quantization.NONE, stored=Q4_K).rounded(Q4_K, H100).matrices is MatrixKind.FLOAT8


def choose(quantization=Quantization.AUTO, kv=None, model=WIDE, stored=BFLOAT16, capability=H100):
    """With everything as it comes but what is named."""
    return choose_gpu_numerics(quantization, kv, model, stored, capability)


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        (BFLOAT16, FloatType.BFLOAT16),
        (FLOAT8, FloatType.BFLOAT16),
        (FLOAT16, FloatType.FLOAT16),
        (stored_as(FloatType.FLOAT32), FloatType.FLOAT16),
        ({}, FloatType.BFLOAT16),
    ],
)
def test_a_model_is_computed_in_the_type_of_its_file(stored, dtype):
    """bfloat16 where there is any, or where weights are random; keys and values in the same, or as asked for."""
    numerics = choose(stored=stored)
    assert (numerics.dtype, numerics.kv.value) == (dtype, dtype.value)
    for kv in (KvDtype.FP8_E4M3, KvDtype.INT8):
        assert choose(kv=kv, stored=stored).kv is kv


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_gemma_is_never_computed_in_float16(family):
    assert choose(model=FAMILY_CONFIGS[family], stored=FLOAT16).dtype is FloatType.BFLOAT16


@pytest.mark.parametrize(
    ("quantization", "capability", "matrices"),
    [
        (Quantization.AUTO, H100, MatrixKind.AS_STORED),
        (Quantization.AUTO, A100, MatrixKind.DENSE),
        (Quantization.NONE, H100, MatrixKind.DENSE),
        (Quantization.FP8, H100, MatrixKind.FLOAT8),
        (Quantization.FP8, L4, MatrixKind.FLOAT8),
    ],
)
def test_matrices_become_what_the_gpu_has_arithmetic_for(quantization, capability, matrices):
    """float8 stays so unless the GPU has none or something else is asked for."""
    assert choose(quantization, stored=FLOAT8, capability=capability).matrices is matrices


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"quantization": Quantization.FP8, "capability": A100}, "--quantization fp8 .* 8.9, .* has 8.0: choose auto"),
        ({"kv": KvDtype.FP8_E4M3, "capability": A100}, "--kv-cache-dtype fp8_e4m3 .* 8.9, .* choose int8 or bfloat16"),
        ({"kv": KvDtype.FLOAT32}, "--kv-cache-dtype float32 .* choose auto, bfloat16, fp8_e4m3 or int8"),
        ({"kv": KvDtype.FLOAT16}, "--kv-cache-dtype float16 does not go with .* bfloat16"),
        ({"kv": KvDtype.BFLOAT16, "stored": FLOAT16}, "choose auto, float16, fp8_e4m3 or int8"),
    ],
)
def test_what_a_gpu_does_not_take_is_refused_with_what_to_choose(arguments, sentence):
    with pytest.raises(LimitError, match=sentence):
        choose(**arguments)


@pytest.mark.parametrize("head_dim", [12, 264])
def test_heads_that_no_kernel_takes_are_refused(head_dim):
    with pytest.raises(UnsupportedModelError, match=f"heads of {head_dim} dimensions.* choose --runner cpu"):
        choose(model=replace(WIDE, head_dim=head_dim))


def test_the_twin_computes_in_float32():
    """And refuses what would not be."""
    assert choose_twin_numerics(Quantization.AUTO, None) == FLOAT32_NUMERICS
    assert choose_twin_numerics(Quantization.NONE, KvDtype.FLOAT32) == FLOAT32_NUMERICS
    with pytest.raises(LimitError, match="--quantization fp8 needs a GPU"):
        choose_twin_numerics(Quantization.FP8, None)
    with pytest.raises(LimitError, match="--kv-cache-dtype int8 needs a GPU"):
        choose_twin_numerics(Quantization.AUTO, KvDtype.INT8)


@pytest.mark.parametrize(
    ("quantization", "kv", "sentence"),
    [
        (Quantization.FP8, None, "--quantization fp8 is for GPUs: choose auto or none"),
        (Quantization.AUTO, KvDtype.BFLOAT16, "--kv-cache-dtype bfloat16 is for GPUs: choose auto, float32"),
        (Quantization.NONE, KvDtype.FP8_E4M3, "--kv-cache-dtype fp8_e4m3 is for GPUs"),
    ],
)
def test_a_cpu_refuses_what_is_for_gpus(quantization, kv, sentence):
    """Instead of choosing something else in silence."""
    with pytest.raises(LimitError, match=sentence):
        choose_cpu_numerics(quantization, kv, WIDE, 16)


def tensors_of(model):
    """All that a model holds, found by walking through its attributes."""
    found, stack, seen = {}, [model], set()
    while stack:
        thing = stack.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, list | tuple):
            stack.extend(thing)
        elif type(thing).__module__.startswith("paceline"):
            names = getattr(type(thing), "__slots__", ()) or vars(thing)
            stack.extend(getattr(thing, name) for name in names)
    return sum(found.values())


@pytest.mark.parametrize("matrices", [MatrixKind.DENSE, MatrixKind.FLOAT8])
@pytest.mark.parametrize(
    "options", [{}, {"tie_word_embeddings": False}, {"local_rope": Rope(1e6)}], ids=["tied", "untied", "two tables"]
)
def test_the_estimate_is_what_uploading_takes(matrices, options):
    checkpoint = RandomCheckpoint(replace(WIDE, **options))
    numerics = Numerics(matrices, KvDtype.FLOAT16, FloatType.FLOAT16)
    model = upload_model(checkpoint, torch.device("cpu"), 64, numerics)

    assert tensors_of(model) == numerics.weight_bytes(checkpoint.config, {}) + rotation_bytes(checkpoint.config, 64)


def test_float8_that_stays_so_counts_a_byte_and_a_scale_for_each_row():
    as_stored = Numerics(MatrixKind.AS_STORED, KvDtype.BFLOAT16, FloatType.BFLOAT16)
    rounded = Numerics(MatrixKind.FLOAT8, KvDtype.BFLOAT16, FloatType.BFLOAT16)
    assert as_stored.weight_bytes(WIDE, FLOAT8) == rounded.weight_bytes(WIDE, BFLOAT16)
    assert as_stored.weight_bytes(WIDE, BFLOAT16) == 2 * sum(
        HostWeights(RandomCheckpoint(WIDE)).checkpoint.tensor(name).size for name in WIDE.tensor_shapes()
    )


def test_blocks_of_a_file_count_their_bits_but_where_rows_are_taken_of_them():
    """A step of many tokens widens gates and what is beside them, or the output matrix."""
    model = replace(WIDE, hidden_size=256, intermediate_size=512, tie_word_embeddings=False)
    matrices = {name: math.prod(shape) for name, shape in model.tensor_shapes().items() if len(shape) == 2}
    embedding, norms = matrices.pop("model.embed_tokens.weight"), 5 * 256
    stored = dict.fromkeys(model.tensor_shapes(), GGMLQuantizationType.Q4_K)
    as_stored, dense = (choose(each, model=model, stored=stored) for each in (Quantization.AUTO, Quantization.NONE))
    assert as_stored.weight_bytes(model, stored) == sum(matrices.values()) * 6 / 8 + 2 * (embedding + norms)
    assert dense.weight_bytes(model, stored) == 2 * (sum(matrices.values()) + embedding + norms)
    assert as_stored.widened_bytes(model, stored) == 2 * 2 * 256 * 512
    assert as_stored.widened_bytes(replace(model, vocab_size=4096), stored) == 2 * 256 * 4096
    assert dense.widened_bytes(model, stored) == 0

"""What comes out of a GGUF file is what went in, and a file that cannot be served is refused by name."""

import os
from dataclasses import replace

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from paceline_executor.errors import ModelCorruptError, ModelNotFoundError, UnsupportedModelError
from paceline_executor.weights import load_checkpoint
from random_models import (
    TINY_CONFIG,
    RandomCheckpoint,
    default_model_path,
    gguf_name,
    gguf_parts,
)

WIDE_CONFIG = replace(TINY_CONFIG, hidden_size=256, num_layers=1, head_dim=64)  # K-quants come in rows of 256
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def assert_bitwise_equal(name, found, expected):
    """The same float32 values, signs of zeros included."""
    assert found.dtype == expected.dtype == np.float32, name
    assert found.flags.c_contiguous, name
    assert np.array_equal(found.view(np.uint32), expected.view(np.uint32)), name


@pytest.mark.parametrize("tied", [True, False])
def test_a_written_model_is_read_back(tmp_path, tied):
    """In float32 every tensor and the configuration survive the round trip."""
    checkpoint = RandomCheckpoint(replace(TINY_CONFIG, tie_word_embeddings=tied))
    loaded = load_checkpoint(gguf_parts(checkpoint).write(tmp_path / "tiny.gguf"))
    assert loaded.config == checkpoint.config
    for name in checkpoint.config.tensor_shapes():
        assert_bitwise_equal(name, loaded.tensor(name), checkpoint.tensor(name))


def test_a_tied_model_has_no_lm_head(tmp_path):
    """The name is unknown then, as `Checkpoint.tensor` says."""
    loaded = load_checkpoint(gguf_parts(RandomCheckpoint()).write(tmp_path / "tiny.gguf"))
    with pytest.raises(KeyError):
        loaded.tensor("lm_head.weight")


def dequantizable_types():
    """Every type the installed gguf library turns into float32."""
    for kind in GGMLQuantizationType:
        try:
            gguf.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            continue
        yield kind


@pytest.mark.parametrize("kind", list(dequantizable_types()), ids=lambda kind: kind.name)
def test_every_type_is_dequantised_as_the_library_does(tmp_path, kind):
    """Blocks of random bits, in whole rows as stored: no regrouping of rows changes a value."""
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    parts = gguf_parts(RandomCheckpoint(WIDE_CONFIG))
    generator = np.random.default_rng(1)
    expected = {}
    for name, shape in WIDE_CONFIG.tensor_shapes().items():
        if len(shape) == 2 and shape[1] % block_elements == 0 and "k_proj" not in name and "q_proj" not in name:
            data = generator.integers(0, 255, (shape[0], shape[1] // block_elements * block_bytes), np.uint8)
            data &= 0xBF  # exponents stay below those of infinity and NaN, in every float type
            data = data if kind.name != "F16" else data.view(np.float16)
            data = data if kind.name != "F32" else data.view(np.float32)
            parts.tensors[gguf_name(name)] = (data, kind)
            with np.errstate(all="ignore"):
                expected[name] = gguf.dequantize(data, kind)
    loaded = load_checkpoint(parts.write(tmp_path / "wide.gguf"))
    assert len(expected) >= 5
    for name, values in expected.items():
        assert_bitwise_equal(name, loaded.tensor(name), values)


def test_rows_of_quantised_projections_are_put_back_in_order(tmp_path):
    checkpoint = RandomCheckpoint(TINY_CONFIG)
    parts = gguf_parts(checkpoint, GGMLQuantizationType.Q8_0)
    loaded = load_checkpoint(parts.write(tmp_path / "tiny.gguf"))
    original = checkpoint.tensor(Q_PROJ)
    expected = gguf.dequantize(gguf.quantize(original, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)
    assert_bitwise_equal(Q_PROJ, loaded.tensor(Q_PROJ), expected)


@pytest.mark.slow
def test_the_default_model_equals_what_transformers_reads():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = default_model_path(os.environ)
    loaded = load_checkpoint(path)
    with torch.device("meta"):
        empty = LlamaForCausalLM(LlamaConfig(num_hidden_layers=loaded.config.num_layers))
    oracle = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=empty)
    for name in loaded.config.tensor_shapes():
        assert_bitwise_equal(name, loaded.tensor(name), oracle["tensors"].pop(name).numpy())
    assert not oracle["tensors"]
    config = oracle["config"]
    assert (loaded.config.rms_norm_eps, loaded.config.rope.theta) == (config["rms_norm_eps"], config["rope_theta"])
    assert (loaded.config.head_dim, loaded.config.num_kv_heads) == (config["head_dim"], config["num_key_value_heads"])
    assert loaded.config.tie_word_embeddings == config["tie_word_embeddings"]


CORRUPT = {
    "llama.attention.head_count": (None, r"llama\.attention\.head_count is missing"),
    "llama.embedding_length": (0, "llama.embedding_length is 0"),
    "llama.block_count": (3_000_000_000, "llama.block_count is 3000000000"),
    "llama.context_length": (2**31, "llama.context_length is 2147483648"),
    "llama.attention.head_count_kv": (3, r"attention\.head_count_kv is 3, which does not divide 4"),
    "llama.attention.key_length": (7, r"llama\.attention\.key_length is 7, which is odd"),
    "llama.attention.layer_norm_rms_epsilon": (float("nan"), "layer_norm_rms_epsilon is not a finite number"),
    "llama.rope.freq_base": (-1.0, "llama.rope.freq_base is -1.0"),
    "llama.vocab_size": (999, "llama.vocab_size disagrees with the 272 rows"),
    "llama.feed_forward_length": ("many", "llama.feed_forward_length is not an integer"),
}
UNSUPPORTED = {
    "general.architecture": ("mamba", "its architecture is 'mamba', and this version runs llama, qwen2, qwen3"),
    "split.count": (2, "one part of a model split"),
    "llama.rope.scaling.type": ("spiral", "llama.rope.scaling.type 'spiral' is not known"),
    "llama.final_logit_softcapping": (30.0, "sets llama.final_logit_softcapping to '30.0'"),
    "llama.rope.dimension_count": (8, "llama.rope.dimension_count differs from the head dimension 16"),
}


@pytest.mark.parametrize(
    ("key", "value", "error", "message"),
    [
        *(
            (key, value, ModelCorruptError, f"cannot be used: .*{message}.*; correct")
            for key, (value, message) in CORRUPT.items()
        ),
        *((key, value, UnsupportedModelError, message) for key, (value, message) in UNSUPPORTED.items()),
    ],
)
def test_impossible_metadata_and_features_that_this_version_lacks_are_named(tmp_path, key, value, error, message):
    """Refused rather than computed wrongly."""
    parts = gguf_parts(RandomCheckpoint())
    parts.metadata[key] = value
    if value is None:
        del parts.metadata[key]
    with pytest.raises(error, match=message):
        load_checkpoint(parts.write(tmp_path / "tiny.gguf"))


F32, I32 = GGMLQuantizationType.F32, GGMLQuantizationType.I32
WRONG_TENSORS = {
    "missing": ("blk.1.ffn_up.weight", None, ModelCorruptError, r"tensor blk\.1\.ffn_up\.weight is missing"),
    "of another shape": (
        "output_norm.weight",
        (np.ones(65, np.float32), F32),
        ModelCorruptError,
        r"output_norm\.weight has shape \(65,\) where \(64,\) is needed",
    ),
    # A bias that were left out silently would change every answer.
    "that a Llama does not use": (
        "blk.1.attn_q.bias",
        (np.ones(64, np.float32), F32),
        UnsupportedModelError,
        r"blk\.1\.attn_q\.bias",
    ),
    "of a type without dequantisation": (
        "output_norm.weight",
        (np.ones(64, np.int32), I32),
        UnsupportedModelError,
        "cannot dequantise its I32 tensors",
    ),
}


@pytest.mark.parametrize(("name", "tensor", "error", "message"), WRONG_TENSORS.values(), ids=WRONG_TENSORS)
def test_tensors_that_do_not_fit_the_metadata_are_named(tmp_path, name, tensor, error, message):
    parts = gguf_parts(RandomCheckpoint())
    parts.tensors.pop(name, None)
    parts.tensors |= {} if tensor is None else {name: tensor}
    with pytest.raises(error, match=message):
        load_checkpoint(parts.write(tmp_path / "tiny.gguf"))


def test_settings_that_change_nothing_are_accepted(tmp_path):
    parts = gguf_parts(RandomCheckpoint())
    parts.metadata |= {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 1.0, "llama.expert_count": 0}
    assert load_checkpoint(parts.write(tmp_path / "tiny.gguf")).config == TINY_CONFIG


def test_weights_that_are_not_finite_are_refused(tmp_path):
    """A model with a NaN would answer every request with an error."""
    parts = gguf_parts(RandomCheckpoint())
    parts.tensors["output_norm.weight"] = (np.full(64, np.inf, np.float32), GGMLQuantizationType.F32)
    loaded = load_checkpoint(parts.write(tmp_path / "tiny.gguf"))
    with pytest.raises(ModelCorruptError, match=r"output_norm\.weight holds values that are not finite"):
        loaded.tensor("model.norm.weight")


def test_a_file_cut_after_it_was_opened_is_noticed(tmp_path):
    """Reading raises; a mapping would have killed the process."""
    path = gguf_parts(RandomCheckpoint()).write(tmp_path / "tiny.gguf")
    loaded = load_checkpoint(path)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(ModelCorruptError, match="became shorter"):
        loaded.tensor("model.norm.weight")


def test_paths_without_a_model_are_refused(tmp_path):
    with pytest.raises(ModelNotFoundError, match="No such file"):
        load_checkpoint(tmp_path / "absent.gguf")
    with pytest.raises(UnsupportedModelError, match="it is a folder"):
        load_checkpoint(tmp_path)

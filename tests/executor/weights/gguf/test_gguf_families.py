"""The same model is the same, whether it is read from a Hugging Face folder or from a GGUF file."""

import math
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf.constants import MODEL_ARCH, GGMLQuantizationType

from paceline_executor.errors import ModelCorruptError, UnsupportedModelError
from paceline_executor.weights import load_checkpoint
from paceline_executor.weights.checkpoint import LinearScaling, LongropeScaling, Rope, YarnScaling
from random_models import GgufParts

LAYERS, HEADS, KV_HEADS, HEAD_DIM, MAX_LEN = 6, 4, 2, 16, 64
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": MAX_LEN,
    "rms_norm_eps": 2.0**-17,  # GGUF keeps it in float32: a power of two survives
}
GEMMA = {"head_dim": HEAD_DIM, "query_pre_attn_scalar": HEAD_DIM, "sliding_window": 8}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES),
    "llama with biases": transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=8),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=HEAD_DIM, tie_word_embeddings=True),
    "gemma2": transformers.Gemma2Config(**SIZES, **GEMMA),
    "gemma3": transformers.Gemma3TextConfig(**SIZES, **GEMMA),
}
ARCHITECTURES = {"llama with biases": "llama", "mistral": "llama"}


def random_model(family):
    """A model of the family with weights that are all different."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[family])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def parts_of(family, model=None):
    """The model as llama.cpp's converter writes it; tensors are named by the gguf library's own table."""
    architecture = ARCHITECTURES.get(family, family)
    parts = GgufParts(metadata_of(family, architecture))
    names = gguf.get_tensor_name_map(MODEL_ARCH[architecture.upper()], LAYERS)
    for name, tensor in (model or random_model(family)).state_dict().items():
        values = tensor.numpy()
        if name == "lm_head.weight" and CONFIGS[family].tie_word_embeddings:
            continue
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + np.float32(1)
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = HEADS if "q_proj" in name else KV_HEADS
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        parts.tensors[stored] = (np.ascontiguousarray(values), GGMLQuantizationType.F32)
    return parts


def metadata_of(family, architecture):
    """The keys that the converter writes."""
    config = CONFIGS[family]
    rope = config.rope_parameters
    values = {
        "block_count": LAYERS,
        "context_length": MAX_LEN,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": rope.get("full_attention", rope)["rope_theta"],
    }
    if family in ("mistral", "gemma2", "gemma3"):
        values["attention.sliding_window"] = 8
    if family == "gemma2":
        values |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return {"general.architecture": architecture} | {f"{architecture}.{key}": value for key, value in values.items()}


def read(tmp_path, parts):
    """The checkpoint that these parts make."""
    return load_checkpoint(parts.write(tmp_path / "model.gguf"))


@pytest.mark.parametrize("family", CONFIGS)
def test_a_gguf_file_holds_the_model_that_its_folder_holds(tmp_path, family):
    model = random_model(family)
    model.save_pretrained(tmp_path)
    folder, file = load_checkpoint(tmp_path), read(tmp_path, parts_of(family, model))
    offset = np.float32(1 if folder.config.unit_offset_norms else 0)
    for name in folder.config.tensor_shapes():
        expected = folder.tensor(name) + offset if name.endswith("norm.weight") else folder.tensor(name)
        assert np.array_equal(file.tensor(name), expected), name
    assert file.config == replace(
        folder.config,
        architecture=ARCHITECTURES.get(family, family),
        unit_offset_norms=False,
        attention_scale=None,  # both mean HEAD_DIM ** -0.5
    )


def test_quantised_biased_projections_are_put_back_in_order(tmp_path):
    model = random_model("llama with biases")
    parts = parts_of("llama with biases", model)
    stored = parts.tensors["blk.0.attn_q.weight"][0]
    parts.tensors["blk.0.attn_q.weight"] = (gguf.quantize(stored, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)
    parts.tensors["blk.0.attn_q.bias"] = (
        parts.tensors["blk.0.attn_q.bias"][0].astype(np.float16),
        GGMLQuantizationType.F16,
    )
    checkpoint = read(tmp_path, parts)
    state = model.state_dict()
    for part, bound in (("weight", 0.01), ("bias", 0.001)):
        name = f"model.layers.0.self_attn.q_proj.{part}"
        assert np.abs(checkpoint.tensor(name) - state[name].numpy()).max() < bound


def llama3_factors():
    """What the converter writes for Llama 3.1: by how much each frequency is divided."""
    parameters = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    parameters |= {"original_max_position_embeddings": 32, "rope_theta": 10_000.0}
    scaled = transformers.LlamaConfig(**SIZES, rope_parameters=parameters)
    inverse, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](scaled, "cpu")
    plain = 10_000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    return (plain / inverse).float().numpy()


def test_factors_of_frequencies_are_read_from_their_tensor(tmp_path):
    """As Llama 3.1 and later have them."""
    parts, factors = parts_of("llama"), llama3_factors()
    assert len(set(factors.round(3))) > 2
    parts.tensors["rope_freqs.weight"] = (factors, GGMLQuantizationType.F32)
    config = read(tmp_path, parts).config
    expected = tuple(factors.tolist())
    assert config.rope == Rope(10_000.0, LongropeScaling(expected, expected, MAX_LEN, 1.0))
    assert config.max_model_len == MAX_LEN


def test_short_and_long_factors_are_read_from_their_tensors(tmp_path):
    parts = parts_of("llama")
    parts.metadata |= {"llama.rope.scaling.attn_factor": 1.25, "llama.rope.scaling.original_context_length": 32}
    for name, value in (("short", 1.5), ("long", 4.0)):
        parts.tensors[f"rope_factors_{name}.weight"] = (np.full(8, value, np.float32), GGMLQuantizationType.F32)
    scaling = read(tmp_path, parts).config.rope.scaling
    assert scaling == LongropeScaling((1.5,) * 8, (4.0,) * 8, 32, 1.25)


YARN = {"type": "yarn", "factor": 4.0, "original_context_length": 32}
SCALINGS = {
    "yarn": (YARN, YarnScaling(4.0, 32, 32.0, 1.0, 0.1 * math.log(4) + 1), 128),
    "yarn with its own attention": (
        YARN | {"attn_factor": 0.5},
        YarnScaling(4.0, 32, 32.0, 1.0, 0.5 * (0.1 * math.log(4) + 1)),
        128,
    ),
    "linear": ({"type": "linear", "factor": 4.0}, LinearScaling(4.0), 256),
    "unnamed": ({"factor": 4.0}, LinearScaling(4.0), 256),
    "linear by nothing": ({"type": "linear", "factor": 0.0}, None, 64),
    "none": ({"type": "none", "factor": 4.0}, None, 64),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_rope_scaling_is_read_as_llama_cpp_reads_it(tmp_path, name):
    values, scaling, max_model_len = SCALINGS[name]
    parts = parts_of("qwen2")
    parts.metadata |= {f"qwen2.rope.scaling.{key}": value for key, value in values.items()}
    config = read(tmp_path, parts).config
    assert config.rope.scaling == scaling
    assert config.max_model_len == max_model_len


def test_gemma_3_scales_the_frequencies_of_full_layers_only(tmp_path):
    parts = parts_of("gemma3")
    parts.metadata |= {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    config = read(tmp_path, parts).config
    assert config.rope == Rope(1_000_000.0, LinearScaling(8.0))
    assert config.local_rope == Rope(10_000.0)
    assert config.max_model_len == MAX_LEN


def test_which_layers_slide_may_be_listed(tmp_path):
    parts = parts_of("gemma2")
    parts.metadata["gemma2.attention.sliding_window_pattern"] = [True, True, False, True, False, False]
    assert read(tmp_path, parts).config.sliding_layers == (True, True, False, True, False, False)


REFUSED = {
    "rope.scaling.factor": (-2.0, "rope.scaling.factor is -2.0"),
    "rope.freq_base": (1.0, "rope.freq_base is 1.0, which should be above 1"),
    "attention.sliding_window": (1 << 30, "attention.sliding_window is 1073741824"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_cannot_be_computed_is_named(tmp_path, key):
    value, message = REFUSED[key]
    parts = parts_of("qwen2")
    parts.metadata[f"qwen2.{key}"] = value
    with pytest.raises(ModelCorruptError, match=f"cannot be used: qwen2\\.{message}.*; correct"):
        read(tmp_path, parts)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        (np.ones(3, np.float32), ModelCorruptError, "are not 8 numbers"),
        (np.zeros(8, np.float32), ModelCorruptError, "not above 0"),
        (np.full(8, np.nan, np.float32), ModelCorruptError, "not finite"),
        (np.ones((8, 1), np.float32), ModelCorruptError, "not a list of float32 numbers"),
    ],
)
def test_impossible_factors_of_frequencies_are_named(tmp_path, values, error, message):
    parts = parts_of("llama")
    parts.tensors["rope_freqs.weight"] = (values, GGMLQuantizationType.F32)
    with pytest.raises(error, match=message):
        read(tmp_path, parts)


def test_a_quantised_bias_is_refused(tmp_path):
    """Its numbers could not be put back in order."""
    parts = parts_of("qwen2")
    data = gguf.quantize(np.ones(64, np.float32), GGMLQuantizationType.Q8_0)
    parts.tensors["blk.0.attn_q.bias"] = (data, GGMLQuantizationType.Q8_0)
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.attn_q\.bias is one row of Q8_0 numbers"):
        read(tmp_path, parts)


def test_experts_of_an_architecture_without_are_refused(tmp_path):
    parts = parts_of("qwen2")
    parts.metadata["qwen2.expert_count"] = 8
    with pytest.raises(UnsupportedModelError, match=r"sets qwen2\.expert_count to '8'"):
        read(tmp_path, parts)

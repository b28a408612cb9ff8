"""A config.json means what transformers takes it for, and what is not computed is refused by name."""

import json

import numpy as np
import pytest
import transformers

from paceline_executor.errors import ModelCorruptError, UnsupportedModelError
from paceline_executor.weights.checkpoint import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongropeScaling,
    Rope,
    YarnScaling,
)
from paceline_executor.weights.hf.config import read_hf_config

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def config_fields(family="llama", **changes):
    """What a config.json of the family says, with some of it changed; None takes a key out."""
    fields = {"model_type": family, **SIZES, **changes}
    return {name: value for name, value in fields.items() if value is not None}


def read_config(folder, fields):
    """The configuration that these fields make."""
    path = folder / "config.json"
    path.write_text(json.dumps(fields))
    return read_hf_config(path)


FACTORS = [1.0, 1.5, 2.0, 3.0]
SCALINGS = {
    "linear": ({"factor": 4.0}, LinearScaling(4.0), 256),
    "dynamic": ({"factor": 2.0}, DynamicScaling(2.0, 64), 128),
    "yarn": (
        {"factor": 4.0, "original_max_position_embeddings": 32},
        YarnScaling(4.0, 32, 32.0, 1.0, 0.1 * np.log(4) + 1),
        128,
    ),
    "llama3": (
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
        Llama3Scaling(8.0, 1.0, 4.0, 16),
        64,
    ),
    "longrope": (
        {"short_factor": FACTORS, "long_factor": FACTORS, "original_max_position_embeddings": 16},
        LongropeScaling((1.0, 1.5, 2.0, 3.0), (1.0, 1.5, 2.0, 3.0), 16, np.sqrt(1 + np.log(4) / np.log(16))),
        64,
    ),
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_rope_scaling_is_read_from_old_and_new_keys(tmp_path, kind):
    values, scaling, max_model_len = SCALINGS[kind]
    old = config_fields(rope_theta=5e5, rope_scaling={"type": kind, **values})
    new = config_fields(rope_parameters={"rope_type": kind, "rope_theta": 5e5, **values})
    config = read_config(tmp_path, old)
    assert config == read_config(tmp_path, new)
    assert config.rope == Rope(5e5, scaling)
    assert config.max_model_len == max_model_len


def test_without_rope_keys_there_is_no_scaling(tmp_path):
    """As Llama 1 and 2 have it."""
    assert read_config(tmp_path, config_fields()).rope == Rope(10_000.0)


OLD_FILES = {
    "llama 2": config_fields(num_key_value_heads=None, rms_norm_eps=1e-5, pretraining_tp=1),
    "mistral 0.1": config_fields("mistral", sliding_window=4096),
    "mistral 0.2": {**config_fields("mistral", rope_theta=1e6), "sliding_window": None},
    "mistral that says nothing": config_fields("mistral"),
    "qwen 2": config_fields("qwen2", sliding_window=8, use_sliding_window=False, max_window_layers=1),
    "qwen 3": config_fields("qwen3", use_sliding_window=True, sliding_window=8, max_window_layers=2),
    "gemma 2": config_fields("gemma2", hidden_act="gelu_pytorch_tanh", attn_logit_softcapping=20.0),
    "gemma 3": config_fields("gemma3_text", sliding_window_pattern=2, rope_local_base_freq=5e3, head_dim=None),
}


@pytest.mark.parametrize("name", OLD_FILES)
def test_files_of_every_age_mean_what_transformers_takes_them_for(tmp_path, name):
    config = read_config(tmp_path, OLD_FILES[name])
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.head_dim == (getattr(theirs, "head_dim", None) or 8)
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.tie_word_embeddings == theirs.tie_word_embeddings
    assert config.attention_softcap == getattr(theirs, "attn_logit_softcapping", None)
    window = getattr(theirs, "sliding_window", None)
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * 3
    expected = [window if kind == "sliding_attention" else None for kind in kinds]
    assert [config.window(layer) for layer in range(3)] == expected
    rope = theirs.rope_parameters
    full, sliding = rope.get("full_attention", rope), rope.get("sliding_attention")
    assert config.rope.theta == full["rope_theta"]
    assert (config.local_rope.theta if config.local_rope else None) == (sliding and sliding["rope_theta"])


REFUSED = {
    "another family": ({"model_type": "mixtral"}, "model_type is 'mixtral', and this version runs llama, mistral"),
    "no family": ({"model_type": None}, "model_type is 'None'"),
    "another head": ({"architectures": ["LlamaForSequenceClassification"]}, "'LlamaForSequenceClassification'"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, "quantised by 'gptq'"),
    "partial rotary": ({"partial_rotary_factor": 0.5}, "rotates a part of each head"),
    "unknown scaling": ({"rope_scaling": {"rope_type": "mrope"}}, "rope_scaling.rope_type 'mrope'"),
    "unknown activation": ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
    "both directions": ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    "odd layers": ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["a"] * 3}, "layer_types has"),
}
IMPOSSIBLE = {
    "hidden_size": (0, "hidden_size is 0, outside 1"),
    "num_hidden_layers": (10**9, "num_hidden_layers is 1000000000"),
    "num_key_value_heads": (3, "num_key_value_heads is 3, which does not divide 4"),
    "head_dim": (7, "head_dim is 7, which is odd"),
    "vocab_size": ("many", "vocab_size is not an integer"),
    "max_position_embeddings": (True, "max_position_embeddings is not an integer"),
    "rms_norm_eps": (float("nan"), "rms_norm_eps is not a finite number"),
    "rope_theta": (-1.0, "rope_theta is -1.0"),
    "rope_scaling": ({"rope_type": "linear"}, "rope_scaling.factor is missing"),
    "tie_word_embeddings": ("no", "tie_word_embeddings is not true or false"),
    "architectures": ([7], "architectures is not a list of names"),
    "intermediate_size": (None, "intermediate_size is missing"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_computed_is_refused_by_name(tmp_path, name):
    """Rather than computed wrongly."""
    changes, message = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=message) as refusal:
        read_config(tmp_path, config_fields(**changes))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("field", IMPOSSIBLE)
def test_impossible_values_are_named(tmp_path, field):
    value, message = IMPOSSIBLE[field]
    with pytest.raises(ModelCorruptError, match=rf"config\.json cannot be used: {message}"):
        read_config(tmp_path, config_fields(**{field: value}))


def test_longrope_factors_are_one_for_each_pair_of_dimensions(tmp_path):
    """A shorter list would leave frequencies without one."""
    scaling = {"type": "longrope", "short_factor": [1.0], "long_factor": FACTORS}
    with pytest.raises(ModelCorruptError, match="short_factor is not a list of 4 numbers above 0"):
        read_config(tmp_path, config_fields(rope_scaling=scaling))


def test_code_in_a_folder_is_not_run(tmp_path):
    (tmp_path / "modeling_evil.py").write_text("raise SystemExit")
    auto_map = {"AutoModelForCausalLM": "modeling_evil.Evil"}
    assert read_config(tmp_path, config_fields(auto_map=auto_map)) == read_config(tmp_path, config_fields())

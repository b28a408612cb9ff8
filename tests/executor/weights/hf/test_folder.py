"""A Hugging Face folder is read as transformers reads it, and one that cannot be served is refused by name."""

import json
import os

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch_file
from tokenizers import Tokenizer, models, pre_tokenizers

from executor_rig.cpu import cpu_runner
from executor_rig.driving import Driver
from paceline_executor.errors import ModelCorruptError, ModelNotFoundError, UnsupportedModelError
from paceline_executor.weights import load_checkpoint, load_model
from paceline_executor.weights.checkpoint import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongropeScaling,
    Rope,
    YarnScaling,
)
from paceline_executor.weights.hf.config import read_hf_config
from paceline_executor.weights.stored_checkpoint import floats_of
from paceline_executor.weights.stored_tensor import FloatType
from random_models import llama_fields, tiny_checkpoint

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
HEADS = {"head_dim": 16}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES, **HEADS, attention_bias=True, mlp_bias=True),
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=8),
    "qwen2": transformers.Qwen2Config(**SIZES, use_sliding_window=True, max_window_layers=1, sliding_window=8),
    "qwen3": transformers.Qwen3Config(**SIZES, **HEADS, tie_word_embeddings=True),
    "gemma2": transformers.Gemma2Config(**SIZES, **HEADS, sliding_window=8),
    "gemma3": transformers.Gemma3TextConfig(**SIZES, **HEADS, sliding_window=8),
}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def saved_model(folder, family, dtype=torch.float32, shard="5GB"):
    """A random model of the family, written by transformers into the folder."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[family]).to(dtype)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def assert_same_weights(checkpoint, model):
    """Every tensor that the configuration lists, bit for bit."""
    state = model.state_dict()
    for name in checkpoint.config.tensor_shapes():
        found = checkpoint.tensor(name)
        assert found.dtype == np.float32, name
        assert np.array_equal(found, state[name].float().numpy()), name


@pytest.mark.parametrize("family", CONFIGS)
def test_a_folder_holds_what_transformers_wrote(tmp_path, family):
    """Bfloat16 over several files; what each family adds to a Llama is in the configuration."""
    model = saved_model(tmp_path, family, torch.bfloat16, shard="20KB")
    checkpoint = load_checkpoint(tmp_path)
    config, theirs = checkpoint.config, model.config
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_same_weights(checkpoint, model)
    assert set(model.state_dict()) <= {*config.tensor_shapes(), "lm_head.weight"}
    assert (config.architecture, config.max_model_len) == (family, 64)
    assert config.head_dim == (8 if family in ("mistral", "qwen2") else 16)
    assert config.sliding_window == (None if family in ("llama", "qwen3") else 8)
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 3
    if config.sliding_window:
        assert config.sliding_layers == tuple(kind == "sliding_attention" for kind in kinds)
    gemma = family.startswith("gemma")
    assert (config.post_norms, config.unit_offset_norms, config.embedding_scale != 1) == (gemma, gemma, gemma)
    assert config.attention_scale == (1 / 16 if gemma else None)
    assert (config.attention_softcap, config.logit_softcap) == ((50.0, 30.0) if family == "gemma2" else (None, None))
    assert config.local_rope == (Rope(10_000.0) if family == "gemma3" else None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_float_type_becomes_float32(tmp_path, dtype):
    model = saved_model(tmp_path, "llama", DTYPES[dtype])
    assert_same_weights(load_checkpoint(tmp_path), model)


@given(words=st.lists(st.integers(0, 65535), min_size=1, max_size=20))
def test_a_bfloat16_is_the_upper_half_of_a_float32(words):
    """Whatever its bits are, as torch has it."""
    stored = np.array(words, np.uint16)
    expected = torch.from_numpy(stored.view(np.int16).copy()).view(torch.bfloat16).float().numpy()
    assert floats_of(stored.view(np.uint8), FloatType.BFLOAT16).tobytes() == expected.tobytes()


def test_a_read_model_answers_as_transformers_does(tmp_path):
    """Greedy, from files to tokens, in float32."""
    model = saved_model(tmp_path, "llama").eval()
    write_tokenizer(tmp_path)
    checkpoint, tokenizer = load_model(tmp_path)
    assert tokenizer.end_token_ids == (2,)  # of generation_config.json
    prompt = list(range(5, 25))
    driver = Driver(cpu_runner(checkpoint, num_blocks=16, block_size=8))
    ours = driver.run([driver.add(prompt, max_chunk=8)], 20)[0]
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert ours == theirs[0, 20:].tolist()


def write_tokenizer(folder):
    """Words of single letters."""
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate("abc")}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    (folder / "tokenizer.json").write_text(tokenizer.to_str())


def test_of_an_image_model_the_text_model_is_read(tmp_path):
    """Gemma 3 from 4B on is published so."""
    inner = {"model_type": "gemma3_text", **SIZES, **HEADS, "sliding_window": 8}
    model = saved_model(tmp_path, "gemma3")
    weights = {f"language_model.{name}": tensor.numpy() for name, tensor in model.state_dict().items()}
    weights["vision_tower.patch.weight"] = np.zeros((2, 2), np.float32)
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": inner})
    )
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.config.architecture == "gemma3"
    assert_same_weights(checkpoint, model)


SMALL = tiny_checkpoint(num_layers=1, vocab_size=16)


def small_folder(folder, weights=None):
    """A one-layer Llama and its files; the weights may be others than its own."""
    (folder / "config.json").write_text(json.dumps(llama_fields(SMALL.config)))
    save_file(small_weights() if weights is None else weights, folder / "model.safetensors")
    return folder


def small_weights():
    """Its own weights."""
    return {name: SMALL.tensor(name) for name in SMALL.config.tensor_shapes()}


def test_a_folder_is_the_model_it_was_made_of(tmp_path):
    """Configuration and all; floats only."""
    checkpoint = load_checkpoint(small_folder(tmp_path))
    assert checkpoint.config == SMALL.config
    assert checkpoint.quantization == ""
    assert checkpoint.quantized("model.norm.weight") is None
    with pytest.raises(KeyError):
        checkpoint.quantized("lm_head.weight")


def test_an_output_matrix_beside_a_tied_embedding_is_ignored(tmp_path):
    surplus = {
        "lm_head.weight": np.zeros((16, 4), np.float32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32),
    }
    assert load_checkpoint(small_folder(tmp_path, small_weights() | surplus)).config == SMALL.config


WRONG_WEIGHTS = {
    "missing": ({"model.norm.weight": None}, ModelCorruptError, r"tensor model\.norm\.weight is missing"),
    "shape": (
        {"model.norm.weight": np.ones(7, np.float32)},
        ModelCorruptError,
        r"model\.norm\.weight has shape \(7,\) where",
    ),
    "surplus": (
        {"model.layers.0.self_attn.q_proj.bias": np.ones(7, np.float32)},
        UnsupportedModelError,
        r"q_proj\.bias' that a llama model does not use",
    ),
    "type": (
        {"model.norm.weight": np.ones(96)},
        UnsupportedModelError,
        "is of type 'F64'; F32, F16, BF16, F8_E4M3 are read",
    ),
}


@pytest.mark.parametrize("name", WRONG_WEIGHTS)
def test_weights_that_do_not_fit_the_configuration_are_named(tmp_path, name):
    changes, error, message = WRONG_WEIGHTS[name]
    weights = {key: value for key, value in (small_weights() | changes).items() if value is not None}
    with pytest.raises(error, match=message):
        load_checkpoint(small_folder(tmp_path, weights))


def header(**tensors):
    """The bytes of a safetensors header."""
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text


HUGE = {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}
LIES = {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}
DAMAGED = {
    "empty": b"",
    "short": b"\x01\x02",
    "header beyond the file": (1000).to_bytes(8, "little") + b"{}",
    "enormous header": (1 << 62).to_bytes(8, "little") + b"{}",
    "no JSON": (4).to_bytes(8, "little") + b"\xff\xff\xff\xff",
    "larger than the file": header(a=HUGE) + bytes(64),
    "shape against size": header(a=LIES) + bytes(8),
    "overlapping": header(
        a={"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}, b={"dtype": "U8", "shape": [4], "data_offsets": [2, 6]}
    )
    + bytes(6),
    "deep": (100_000).to_bytes(8, "little") + b"[" * 100_000,
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_named(tmp_path, name):
    small_folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(DAMAGED[name])
    with pytest.raises(ModelCorruptError, match=r"model\.safetensors is damaged") as refusal:
        load_checkpoint(tmp_path)
    assert "\n" not in str(refusal.value)


COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}
FLOAT8_CONFIGS = {"a tensor": {"quant_method": "fp8", "activation_scheme": "static"}, "a row": COMPRESSED}


def float8_folder(folder, quantization, scale_shape, scale_dtype=torch.float32):
    """A one-layer Llama whose matrices are float8, and what its weights are."""
    small_folder(folder)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    stored, expected = {}, {}
    for name, values in small_weights().items():
        stored[name], expected[name] = torch.from_numpy(values), values
        if values.ndim == 2 and "embed" not in name:
            numbers = torch.from_numpy(values).to(torch.float8_e4m3fn)
            scale = torch.linspace(0.5, 2, max(1, np.prod(scale_shape(values), dtype=int))).to(scale_dtype)
            stored[name], stored[f"{name}_scale"] = numbers, scale.reshape(scale_shape(values))
            stored[name.replace(".weight", ".input_scale")] = torch.tensor(0.1)
            if scale.numel() in (1, len(values)):
                expected[name] = (numbers.float() * scale.float().reshape(-1, 1)).numpy()
    save_torch_file(stored, folder / "model.safetensors")
    return expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [lambda _: (), lambda _: (1,), lambda values: (values.shape[0], 1)])
@pytest.mark.parametrize("quantization", FLOAT8_CONFIGS.values(), ids=FLOAT8_CONFIGS.keys())
def test_float8_is_read_with_its_scales(tmp_path, quantization, shape, dtype):
    expected = float8_folder(tmp_path, quantization, shape, dtype)
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.quantization == "float8_e4m3fn"
    for name, values in expected.items():
        assert np.array_equal(checkpoint.tensor(name), values), name


def test_float8_without_a_scale_that_fits_is_named(tmp_path):
    float8_folder(tmp_path, COMPRESSED, lambda _: (2, 1))
    with pytest.raises(
        ModelCorruptError, match=r"_scale' is of shape \(2, 1\), neither one number nor one for each of"
    ):
        load_checkpoint(tmp_path)
    weights = {name: torch.from_numpy(values).to(torch.float8_e4m3fn) for name, values in small_weights().items()}
    save_torch_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelCorruptError, match="has no scale beside it"):
        load_checkpoint(tmp_path)


def test_weights_that_are_not_finite_are_named(tmp_path):
    """A model with a NaN would answer every request with an error."""
    weights = small_weights() | {"model.norm.weight": np.full(SMALL.config.hidden_size, np.nan, np.float32)}
    checkpoint = load_checkpoint(small_folder(tmp_path, weights))
    with pytest.raises(ModelCorruptError, match=r"model\.norm\.weight holds values that are not finite"):
        checkpoint.tensor("model.norm.weight")


def test_a_file_cut_after_it_was_opened_is_named(tmp_path):
    """Reading raises; a mapping would have killed the process."""
    checkpoint = load_checkpoint(small_folder(tmp_path))
    os.truncate(tmp_path / "model.safetensors", 2000)
    with pytest.raises(ModelCorruptError, match="became shorter"):
        checkpoint.tensor("model.norm.weight")


@pytest.mark.parametrize(
    "places",
    [
        {},
        {"a": "../secret.safetensors"},
        {"a": "/etc/passwd"},
        {"a": "sub/model.safetensors"},
        {"a": "model.bin"},
        {"a": 7},
        ["model.safetensors"],
        {"a": "a\0.safetensors"},
    ],
)
def test_an_index_names_only_files_beside_it(tmp_path, places):
    """A path that leaves the folder is refused, as is any other kind of file."""
    small_folder(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ModelCorruptError, match=r"index\.json is damaged"):
        load_checkpoint(tmp_path)


OTHERS = ("consolidated.safetensors", "consolidated-00001-of-00002.safetensors", "adapter_model.safetensors")


@pytest.mark.parametrize("index", ["", "gptq_model-4bit-128g.safetensors.index.json"])
@pytest.mark.parametrize("name", ["gptq_model-4bit-128g.safetensors", "model-00001-of-00001.safetensors"])
def test_the_only_file_of_weights_is_read_whatever_its_name(tmp_path, name, index):
    """AutoGPTQ names it, or its index, after the bits. Other formats of the same weights and adapters do not count."""
    small_folder(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    for other in OTHERS:
        (tmp_path / other).write_bytes(b"")
    if index:
        (tmp_path / "more.safetensors").write_bytes(b"")
        (tmp_path / index).write_text(json.dumps({"weight_map": {"a": name}}))
    write_tokenizer(tmp_path)
    assert load_model(tmp_path)[0].config == SMALL.config


@pytest.mark.parametrize("names", [("a.safetensors", "b.safetensors"), ("m-00002-of-00010.safetensors",), OTHERS])
def test_files_of_which_none_must_be_the_models_are_named(tmp_path, names):
    small_folder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    for name in names:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(
        UnsupportedModelError, match=f"neither a model.safetensors nor .*{str(sorted(names))[1:-1]} hold"
    ):
        load_checkpoint(tmp_path)


def test_an_absent_part_is_named(tmp_path):
    small_folder(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "part-2.safetensors"}}))
    with pytest.raises(ModelNotFoundError, match=r"part-2\.safetensors"):
        load_checkpoint(tmp_path)


def test_files_that_may_run_code_are_not_read(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(b"\x80\x04")
    for given_path in (tmp_path, path):
        with pytest.raises(UnsupportedModelError, match=r"pytorch_model\.bin is not read.*convert.*to safetensors"):
            load_checkpoint(given_path)


def test_a_part_of_a_model_is_not_a_model(tmp_path):
    with pytest.raises(UnsupportedModelError, match="give the path of the folder"):
        load_checkpoint(small_folder(tmp_path) / "model.safetensors")


def test_a_folder_without_a_configuration_or_tokenizer_says_which(tmp_path):
    small_folder(tmp_path)
    with pytest.raises(ModelNotFoundError, match=r"tokenizer\.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        load_model(tmp_path)


# Its config.json


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
    "another family": ({"model_type": "mamba"}, "model_type is 'mamba', and this version runs llama, mistral"),
    "no family": ({"model_type": None}, "model_type is 'None'"),
    "another head": ({"architectures": ["LlamaForSequenceClassification"]}, "'LlamaForSequenceClassification'"),
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

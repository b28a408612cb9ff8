"""What a folder's small files say is what transformers makes of them: files and their keys, family by family.

The next kind of mistake is found by a row more.
"""

import json

import pytest
import torch
from tokenizers import processors

from paceline_executor.link.tokenizer import tokenizer_content
from paceline_executor.weights import load_tokenizer
from paceline_executor.weights.hf.config import read_hf_config
from paceline_scheduler.api.text.tokenizer import read_text_model
from paceline_scheduler.link.wire import decode_tokenizer
from paceline_scheduler.testing.tokenizers import sentence_piece_tokenizer

TEXT = "hello world " * 30


def written(folder, files):
    """Write files, each given as what its JSON says; those of the tokenizer change what it says."""
    changed = files.get("tokenizer.json", {})
    whole = json.loads(sentence_piece_tokenizer().to_str()) | changed
    small = {"config.json": {"model_type": "llama", "vocab_size": 400}} | files
    for name, fields in (small | {"tokenizer.json": whole}).items():
        (folder / name).write_text(json.dumps(fields))
    return folder


def served(folder):
    """A scheduler's view of the folder's tokenizer, as an executor sends it."""
    source = decode_tokenizer(tokenizer_content(load_tokenizer(folder)), 2)
    return source, read_text_model(source, 400)


def adding(single, **special):
    """A post-processor that puts special tokens around a text."""
    tokenizer = sentence_piece_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(special.items()))
    return json.loads(tokenizer.to_str())["post_processor"]


NAMED = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
CUT = {"direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0}
FILLED = {
    "strategy": {"Fixed": 96},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 2,
    "pad_type_id": 0,
    "pad_token": "</s>",
}
BEGINS = adding("<s> $A", **{"<s>": 1})
TOKEN = {"content": "</s>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
FILES = {
    "cut": {"tokenizer.json": {"truncation": CUT}, "tokenizer_config.json": NAMED},
    "filled up": {"tokenizer.json": {"padding": FILLED}, "tokenizer_config.json": NAMED | {"pad_token": "</s>"}},
    "a begin token that nothing names": {"tokenizer.json": {"post_processor": BEGINS}},
    "a begin token without a name": {
        "tokenizer.json": {"post_processor": BEGINS},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"},
    },
    "two begin tokens and an end": {
        "tokenizer.json": {"post_processor": adding("<s> <unk> $A </s>", **{"<s>": 1, "<unk>": 0, "</s>": 2})},
        "tokenizer_config.json": NAMED,
    },
    "a begin token that the configuration denies": {
        "tokenizer.json": {"post_processor": BEGINS},
        "tokenizer_config.json": NAMED | {"add_bos_token": False},
    },
    "a begin token that the configuration alone wants": {"tokenizer_config.json": NAMED | {"add_bos_token": True}},
    "an end token that the configuration alone wants": {"tokenizer_config.json": NAMED | {"add_eos_token": True}},
    "the older file of names": {
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<unk>"},
        "special_tokens_map.json": {"bos_token": "<s>", "eos_token": TOKEN, "unk_token": "<unk>"},
    },
    "the older file beside the newer form": {
        "tokenizer_config.json": NAMED | {"added_tokens_decoder": {}},
        "special_tokens_map.json": {"eos_token": "<unk>"},
    },
    "a padding token that no vocabulary has": {"tokenizer_config.json": NAMED | {"pad_token": "<pad>"}},
    "an unknown token": {"tokenizer_config.json": NAMED | {"unk_token": "<unk>"}},
}


@pytest.mark.parametrize("files", FILES.values(), ids=FILES)
def test_prompts_and_names_are_those_of_transformers(tmp_path, files):
    from transformers import AutoTokenizer

    oracle = AutoTokenizer.from_pretrained(str(written(tmp_path, files)))
    source, model = served(tmp_path)
    assert model.encode_text(TEXT).tolist() == oracle.encode(TEXT)
    assert dict(source.special_tokens) == oracle.special_tokens_map


ENDS = {
    "config.json": {"config.json": {"model_type": "llama", "eos_token_id": 200}},
    "a list there": {"config.json": {"model_type": "llama", "eos_token_id": [1, 200]}},
    "its text part": {"config.json": {"model_type": "gemma3", "text_config": {"eos_token_id": 200}}},
    "generation_config.json first": {
        "config.json": {"model_type": "llama", "eos_token_id": 200},
        "generation_config.json": {"eos_token_id": [5, 6]},
    },
}


@pytest.mark.parametrize("files", ENDS.values(), ids=ENDS)
def test_generation_ends_where_transformers_ends_it(tmp_path, files):
    """And at the tokenizer's own end token."""
    from transformers import AutoConfig, GenerationConfig

    written(tmp_path, files | {"tokenizer_config.json": NAMED})
    if "generation_config.json" in files:
        oracle = GenerationConfig.from_pretrained(str(tmp_path))
    else:
        oracle = GenerationConfig.from_model_config(AutoConfig.from_pretrained(str(tmp_path)))
    ends = oracle.eos_token_id if isinstance(oracle.eos_token_id, list) else [oracle.eos_token_id]
    assert served(tmp_path)[0].end_token_ids == (2, *ends)


FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "query_pre_attn_scalar": 8,
}
FULL, SLIDING = "full_attention", "sliding_attention"
WINDOW = {"sliding_window": 8}
ROPE = {"rope_type": "default", "rope_theta": 500.0}
KEYS = {
    "a window": WINDOW,
    "no use of it": WINDOW | {"use_sliding_window": False},
    "use of it": WINDOW | {"use_sliding_window": True},
    "use of it in the last layers": WINDOW | {"use_sliding_window": True, "max_window_layers": 2},
    "the last layers": WINDOW | {"max_window_layers": 2},
    "a pattern": WINDOW | {"sliding_window_pattern": 3},
    "layer types": WINDOW | {"use_sliding_window": True, "layer_types": [FULL, SLIDING] * 3},
    "theta": WINDOW | {"rope_theta": 500.0},
    "parameters": WINDOW | {"rope_parameters": ROPE},
    "theta beside parameters": WINDOW | {"rope_theta": 77.0, "rope_parameters": ROPE},
    "theta beside scaling": WINDOW | {"rope_theta": 77.0, "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
    "a scaling": WINDOW | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "the older scaling": WINDOW | {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "both": WINDOW | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": ROPE},
    "an empty scaling beside parameters": WINDOW | {"rope_scaling": {}, "rope_parameters": ROPE},
}
# What a family's own rules are about; the rest is tried in test-all.
_ROPES = {"theta beside scaling", "an empty scaling beside parameters"}
TELLING = {
    "llama": {"a window", "both"},
    "mistral": {"no use of it", "a pattern"},
    "qwen2": {"no use of it", "use of it in the last layers"},
    "qwen3": _ROPES,
    "gemma2": {"layer types", "a pattern"},
    "gemma3_text": {"a pattern", "a scaling", "the older scaling"},
}
# transformers 5.24 fails at them with a KeyError.
NOWHERE = {("gemma3_text", "an empty scaling beside parameters"), ("gemma3_text", "both")}


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        pytest.param(family, keys, marks=[] if keys in TELLING[family] else [pytest.mark.slow])
        for family in FAMILIES
        for keys in KEYS
        if (family, keys) not in NOWHERE
    ],
)
def test_windows_and_rotations_are_those_of_transformers(tmp_path, family, keys):
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {"model_type": family, "architectures": [FAMILIES[family]], **SHAPE, **KEYS[keys]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    oracle_config = AutoConfig.from_pretrained(str(tmp_path))
    oracle = AutoModelForCausalLM.from_config(oracle_config, attn_implementation="eager").eval()
    with torch.no_grad():
        attentions = oracle(torch.arange(24)[None], output_attentions=True).attentions
    slides = tuple(bool((weights[0, :, -1, :16] == 0).all()) for weights in attentions)
    buffers = dict(oracle.model.rotary_emb.named_buffers())
    rotations = {1 / float(buffer[1]) for name, buffer in buffers.items() if "original" not in name}

    config = read_hf_config(tmp_path / "config.json")
    assert config.sliding_layers == (slides if any(slides) else ())
    ropes = {config.rope, config.local_rope or config.rope}
    assert sorted(map(slowed, ropes)) == pytest.approx(sorted(rotations), rel=1e-5)


def slowed(rope):
    """How many positions the second pair of a head's dimensions takes for a radian."""
    return rope.theta ** (2 / SHAPE["head_dim"]) * (1.0 if rope.scaling is None else rope.scaling.factor)

"""What a folder's small files say is what transformers makes of them: files and their keys, family by family.

The next kind of mistake is found by a row more. transformers, which all is compared with, takes each folder itself.
"""

import functools
import json

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import processors

from edge_rig.tokenizers import sentence_piece_tokenizer
from executor_rig.cpu import cpu_runner
from executor_rig.driving import Draw, Driver
from paceline.plan.hashes import TOKENIZER_FORM
from paceline_executor.errors import UnsupportedModelError
from paceline_executor.link.tokenizer import tokenizer_content
from paceline_executor.weights import load_checkpoint, load_tokenizer
from paceline_scheduler.api.text.tokenizer import read_text_model
from paceline_scheduler.link.wire import decode_tokenizer
from random_models import BYTE_LETTERS

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
TEXT = "hello world " * 30 + "Héllo  it's\n\n 1234 ☃ hello"
OLDER = json.loads(sentence_piece_tokenizer().to_str())


def written(folder, files, tokenizer=OLDER):
    """Write files, each given as what its JSON says; those of the tokenizer change what it says."""
    whole = tokenizer | files.get("tokenizer.json", {})
    small = {"config.json": {"model_type": "llama", "vocab_size": 400}} | files
    for name, fields in (small | {"tokenizer.json": whole}).items():
        (folder / name).write_text(json.dumps(fields))
    return folder


def served(folder):
    """A scheduler's view of the folder's tokenizer, as an executor sends it."""
    source = decode_tokenizer(tokenizer_content(load_tokenizer(folder)), TOKENIZER_FORM)
    return source, read_text_model(source, 400)


def adding(single, **special):
    """A post-processor that puts special tokens around a text."""
    tokenizer = sentence_piece_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(special.items()))
    return json.loads(tokenizer.to_str())["post_processor"]


NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
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
        "tokenizer_config.json": {"eos_token": "</s>"},
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
        "tokenizer_config.json": {"eos_token": "<unk>"},
        "special_tokens_map.json": {"bos_token": "<s>", "eos_token": TOKEN, "unk_token": "<unk>"},
    },
    "the older file beside the newer form": {
        "tokenizer_config.json": NAMED | {"added_tokens_decoder": {}},
        "special_tokens_map.json": {"eos_token": "<unk>"},
    },
    "a padding token that no vocabulary has": {"tokenizer_config.json": NAMED | {"pad_token": "<pad>"}},
    "an unknown token": {"tokenizer_config.json": NAMED | {"unk_token": "<unk>"}},
    "no name": {"tokenizer_config.json": {}},
    "names that are null": {"tokenizer_config.json": dict.fromkeys(("unk_token", "bos_token", "eos_token"))},
}
# Which class makes the tokenizer.json of a vocabulary, and what names a class; the older form is converted from
# SentencePiece.
TOKENIZERS = {
    "older": ("older", {"tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"}}),
    "older, of a Llama": ("older", {"tokenizer_config.json": {"tokenizer_class": "LlamaTokenizerFast"}}),
    "older, of a class in config.json": ("older", {"config.json": {"tokenizer_class": "LlamaTokenizer"}}),
    "older, of no class": ("older", {}),
    "Llama's": ("LlamaTokenizer", {"tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer"}}),
    "Gemma's": ("GemmaTokenizer", {"tokenizer_config.json": {"tokenizer_class": "GemmaTokenizer"}}),
    "Gemma's, of any class": ("GemmaTokenizer", {"tokenizer_config.json": {"tokenizer_class": "TokenizersBackend"}}),
    "Gemma's, of no class": ("GemmaTokenizer", {}),
    "Qwen's": ("Qwen2Tokenizer", {"tokenizer_config.json": {"tokenizer_class": "Qwen2TokenizerFast"}}),
    "Qwen's, of a Llama": ("Qwen2Tokenizer", {"tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer"}}),
    "Qwen's, of no class": ("Qwen2Tokenizer", {}),
}
# What transformers builds of the vocabulary alone, whatever tokenizer.json says beside it: for one family always, for
# others where no class is named. Where that is another tokenizer, the file is meant, as in llama.cpp.
OWN_CLASSES = {"qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer"}
OWN_CLASSES |= dict.fromkeys(("gemma2", "gemma3_text"), "GemmaTokenizer")


def is_built_alike(family, tokenizer):
    kind, files = TOKENIZERS[tokenizer]
    return (bool(files) and family != "qwen2") or OWN_CLASSES.get(family, kind) == kind


@functools.cache
def tokenizer_fields(kind):
    import transformers

    if kind == "older":
        return OLDER
    vocabulary, merges = OLDER["model"]["vocab"], OLDER["model"]["merges"]
    if kind == "Qwen2Tokenizer":
        vocabulary = {text: number for number, text in enumerate(["<unk>", "<s>", "</s>", *BYTE_LETTERS, "he", "Ġw"])}
        merges = [("h", "e"), ("Ġ", "w")]
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    made = getattr(transformers, kind)(vocab=vocabulary, merges=[tuple(merge) for merge in merges], **names)
    return json.loads(made.backend_tokenizer.to_str())


PAIRS = [(family, tokenizer) for tokenizer in TOKENIZERS for family in FAMILIES if is_built_alike(family, tokenizer)]


def tokenizer_folders():
    """Each of the files with a third of the pairs, and in `make test` with one."""
    for number, name in enumerate(FILES):
        for place, pair in enumerate(PAIRS[number % 3 :: 3]):
            yield pytest.param(name, *pair, marks=[] if place == number else [pytest.mark.slow])


@pytest.mark.parametrize(("name", "family", "tokenizer"), list(tokenizer_folders()))
def test_prompts_and_names_are_those_of_transformers(tmp_path, name, family, tokenizer):
    from transformers import AutoTokenizer

    kind, classes = TOKENIZERS[tokenizer]
    files = {"config.json": {"model_type": family, "vocab_size": 400}} | FILES[name]
    files |= {file: files.get(file, {}) | fields for file, fields in classes.items()}
    oracle = AutoTokenizer.from_pretrained(str(written(tmp_path, files, tokenizer_fields(kind))))
    source, model = served(tmp_path)
    assert model.encode_text(TEXT).tolist() == oracle.encode(TEXT)
    assert dict(source.special_tokens) == oracle.special_tokens_map


ENDS = {
    "config.json": {"config.json": {"eos_token_id": 200}},
    "a list there": {"config.json": {"eos_token_id": [1, 200]}},
    "no key": {},
    "none": {"config.json": {"eos_token_id": None}},
    "its text part": {"config.json": {"model_type": "gemma3", "text_config": {"eos_token_id": 200}}},
    "no key of its text part": {"config.json": {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}},
    "generation_config.json first": {
        "config.json": {"eos_token_id": 200},
        "generation_config.json": {"eos_token_id": [5, 6]},
    },
}


@pytest.mark.parametrize(
    ("name", "family"),
    [
        pytest.param(name, family, marks=[] if place == number % 6 else [pytest.mark.slow])
        for number, name in enumerate(ENDS)
        for place, family in enumerate(FAMILIES)
        if "model_type" not in ENDS[name].get("config.json", {}) or place == number % 6
    ],
)
def test_generation_ends_where_transformers_ends_it(tmp_path, name, family):
    """And at the tokenizer's own end token."""
    from transformers import AutoConfig, GenerationConfig

    files = {"config.json": {}, "tokenizer_config.json": NAMED} | ENDS[name]
    written(tmp_path, files | {"config.json": {"model_type": family} | files["config.json"]})
    if "generation_config.json" in files:
        oracle = GenerationConfig.from_pretrained(str(tmp_path))
    else:
        oracle = GenerationConfig.from_model_config(AutoConfig.from_pretrained(str(tmp_path)))
    ends = oracle.eos_token_id if isinstance(oracle.eos_token_id, list) else [oracle.eos_token_id]
    assert served(tmp_path)[0].end_token_ids == tuple(dict.fromkeys([2, *(end for end in ends if end is not None)]))


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
    "tie_word_embeddings": False,
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
    "dynamic scaling": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    "scaling of a Llama 3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "longrope": {
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [2.0, 2.5, 3.0, 3.5],
            "original_max_position_embeddings": 16,
        }
    },
    "another rotation": {"rope_scaling": {"rope_type": "proportional", "factor": 4.0}},
    "a part of each head": {"partial_rotary_factor": 0.5},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "another activation": {"hidden_act": "gelu", "hidden_activation": "gelu"},
    "the other's activation": {"hidden_act": "gelu_pytorch_tanh"},
    "one matrix for both ends": {"tie_word_embeddings": True},
    "caps": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "no caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    "no window": {"sliding_window": None},
    "other layers": WINDOW | {"layer_types": [FULL, "chunked_attention"] * 3},
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
# transformers 5.24 fails at them.
NOWHERE = {
    ("gemma3_text", keys) for keys in ("both", "an empty scaling beside parameters", "other layers", "no window")
}
NOWHERE |= {("gemma2", "no window"), ("qwen2", "other layers"), ("qwen3", "other layers")}
# All that a folder is refused for though transformers takes it.
REFUSALS = (
    "its model_type is",
    "its architecture is",
    "it sets use_bidirectional_attention",
    "its weights are quantised by",
    "its hidden_act",
    "layer_types has others",
    "rope_type 'proportional' is not known",
    "it rotates a part of each head only",
    "F32, F16, BF16, F8_E4M3 are read",
    "has no tokenizer.json",
)


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        pytest.param(family, keys, marks=[] if keys in TELLING[family] else [pytest.mark.slow])
        for family in FAMILIES
        for keys in KEYS
        if (family, keys) not in NOWHERE
    ],
)
@torch.no_grad()
def test_a_model_with_these_keys_computes_what_transformers_computes(tmp_path, family, keys):
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {"model_type": family, "architectures": [FAMILIES[family]], **SHAPE, **KEYS[keys]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    torch.manual_seed(0)
    oracle_config = AutoConfig.from_pretrained(str(tmp_path))
    oracle = AutoModelForCausalLM.from_config(oracle_config, attn_implementation="eager").eval()
    for weights in oracle.parameters():  # of which all are felt
        weights.add_(torch.randn_like(weights), alpha=0.1 if weights.ndim == 1 else weights.shape[-1] ** -0.5)
    save_file(dict(oracle.named_parameters()), tmp_path / "model.safetensors")
    try:
        runner = cpu_runner(load_checkpoint(tmp_path), num_blocks=8, block_size=8)
    except UnsupportedModelError as error:
        if not any(refusal in str(error) for refusal in REFUSALS):
            raise
        return
    driver = Driver(runner)
    row = driver.add(range(24), Draw(num_logprobs=0), max_chunk=8)
    driver.run([row], 8)
    logprobs = oracle(torch.tensor([row.token_ids[:-1]]), use_cache=False).logits[0, 23:].log_softmax(-1)
    assert row.output == logprobs.argmax(-1).tolist()
    chosen = [each.chosen for each in row.logprobs]
    assert chosen == pytest.approx(logprobs.max(-1).values.tolist(), abs=1e-4)

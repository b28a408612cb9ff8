"""A tokenizer out of a Hugging Face folder: tokenizer.json and the small files beside it.

Reads JSON and jinja2 source only: no pickle, no tokenizer class, no code out of the folder.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from paceline.plan.plain_tokenizer import is_plain
from paceline.plan.sampling import GenerationDefaults
from paceline_executor.errors import ModelNotFoundError
from paceline_executor.weights.hf import tokenizer_trial
from paceline_executor.weights.hf.json_fields import MAX_SMALL_FILE_BYTES, JsonFields, read_bounded
from paceline_executor.weights.refusals import MAKE_TOKENIZER, damaged, shown, wrong
from paceline_executor.weights.tokenizer import (
    END_TOKEN_TEXTS,
    SpecialTokens,
    TokenizerBundle,
    make_bundle,
)

_TRIAL_S, _TRIAL_BYTES = 60, 2 << 30
MAX_TOKENIZER_BYTES = 256 << 20
MAX_RESPONSE_TEMPLATE_CHARS = 1 << 18
MAX_TOKEN_ID = 1 << 31
TEMPLATE_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_CLASS_TOKENS = {
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "GemmaTokenizer": {
        "unk_token": "<unk>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
    "Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
}
"""By a class of transformers, the special tokens that it has unless files name others."""
_CLASSES = {"qwen2": "Qwen2Tokenizer", "mistral": ""}  # whatever the files of these families name
_USUAL_CLASSES = {"qwen3": "Qwen2Tokenizer"} | dict.fromkeys(("gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer")
_CLASS_ENDS = {"llama": 2, "mistral": 2, "gemma2": 1, "gemma3_text": 1}  # unless config.json has the key
_TEMPLATE_FILES = {"default": "chat_template.jinja", "tool_use": "additional_chat_templates/tool_use.jinja"}
"""By name; others are chosen by nobody."""
_TEXT_PARTS = ("decoder", "generator", "text_config")
_LEAST_TOP_P = 1e-9  # keeps the likeliest token alone, as transformers does at 0


def tokenizer_from_folder(folder: Path, vocab_size: int | None = None) -> TokenizerBundle:
    """`vocab_size` is how many tokens the model embeds, where that is known.

    Raises ModelNotFoundError without a tokenizer.json, ModelCorruptError naming file and field.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ModelNotFoundError(f"{folder} has no {path.name}: make one {MAKE_TOKENIZER}")
    data = read_bounded(path, MAX_TOKENIZER_BYTES)
    tokenizer = _parse_tokenizer(path, data)
    # Added tokens may lie beyond: that of an image, in the text model of Gemma 3.
    num_tokens = tokenizer.get_vocab_size(with_added_tokens=False)
    if vocab_size is not None and num_tokens > vocab_size:
        raise damaged(
            path, f"it belongs to another model: it lists {num_tokens} tokens, and the model has {vocab_size}"
        )
    config = JsonFields.read_if_there(folder / "tokenizer_config.json")
    generation = JsonFields.read_if_there(folder / "generation_config.json")
    model = JsonFields.read_if_there(folder / "config.json")
    config = config.with_defaults(_class_tokens(model, config, data))
    special = _special_tokens(folder, tokenizer, config, _listed_ends(model, generation))
    templates = _chat_templates(folder, config)
    bundle = make_bundle(
        data, templates.get("default"), special, _defaults(generation), tool_use_template=templates.get("tool_use")
    )
    return replace(bundle, response_template=_response_template(config))


def _parse_tokenizer(path: Path, data: bytes) -> Tokenizer:
    if not is_plain(data):
        _try_elsewhere(path, data)
    try:
        tokenizer = tokenizer_trial.read(data)
        tokenizer.encode("a")  # some damage shows only now
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises nothing narrower, and its panic is no Exception
        raise damaged(path, f"the tokenizers library refuses it ({shown(str(error))})") from error
    return tokenizer


def _try_elsewhere(path: Path, data: bytes) -> None:
    """The library may end the process that reads it, or never come to an end."""
    command = (sys.executable, "-P", "-m", tokenizer_trial.__name__, str(_TRIAL_BYTES))
    try:
        done = subprocess.run(command, input=data, check=False, capture_output=True, timeout=_TRIAL_S)  # noqa: S603
        has_ended = done.returncode == 0
    except subprocess.TimeoutExpired:
        has_ended = False
    if not has_ended:
        room = f"{_TRIAL_S} s and {_TRIAL_BYTES >> 20} MiB"
        raise damaged(path, f"the tokenizers library cannot read it within {room}")


def _token_text(fields: JsonFields, name: str) -> str | None:
    """Written as its text or as an object with the text under `content`."""
    value = fields.get(name)
    text = value.get("content") if isinstance(value, dict) else value
    if text is None or isinstance(text, str):
        return text
    raise fields.fault(name, "not a token")


def _token_ids(fields: JsonFields, name: str) -> list[int]:
    """The field is one id, a list of ids, or none. They may lie beyond the tokenizer's own: models embed more than it
    knows.
    """
    value = fields.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if all(type(token_id) is int and 0 <= token_id < MAX_TOKEN_ID for token_id in ids):
        return ids
    raise fields.fault(name, "neither a token id nor a list of them")


def _special_tokens(
    folder: Path, tokenizer: Tokenizer, config: JsonFields, listed_ends: Sequence[int]
) -> SpecialTokens:
    # It was written before added_tokens_decoder was: the older file has the first word, as in transformers.
    is_old = config.get("added_tokens_decoder") is None
    older = JsonFields.read_if_there(folder / "special_tokens_map.json") if is_old else config.empty()
    texts = {name: _token_text(older, name) or _token_text(config, name) for name in TEMPLATE_NAMES}
    names = {name: text for name, text in texts.items() if text is not None}
    ids = {name: tokenizer.token_to_id(text) for name, text in names.items()}
    eos = ids.get("eos_token")
    added = tokenizer.get_added_tokens_decoder()
    found = [token_id for token_id, token in sorted(added.items()) if token.content in END_TOKEN_TEXTS]
    first = [] if eos is None else [eos]
    prefix, suffix = _around(tokenizer)
    return SpecialTokens(
        bos_token_id=ids.get("bos_token"),
        eos_token_id=eos,
        end_token_ids=tuple(dict.fromkeys([*first, *listed_ends, *found])),
        prefix_token_ids=prefix,
        suffix_token_ids=suffix,
        names=tuple(names.items()),
    )


def _class_tokens(model: JsonFields, config: JsonFields, tokenizer_json: bytes) -> Mapping[str, str]:
    family = model.text("model_type") or ""
    stated = config.text("tokenizer_class") or model.text("tokenizer_class") or _USUAL_CLASSES.get(family, "")
    name = _CLASSES.get(family, stated.removesuffix("Fast"))
    if name == "LlamaTokenizer" and b'"ByteLevel"' in tokenizer_json:
        return {}  # a Llama 3 says so, too, and is of no class
    return _CLASS_TOKENS.get(name, {})


def _listed_ends(model: JsonFields, generation: JsonFields) -> list[int]:
    """Of generation_config.json; where that file is not there, transformers makes it of config.json."""
    if generation.path.exists():
        return _token_ids(generation, "eos_token_id")
    parts = (model, *(model.object(name) for name in _TEXT_PARTS))
    return next((ids for part in parts if part is not None and (ids := _ends_of(part))), [])


def _ends_of(config: JsonFields) -> list[int]:
    default = _CLASS_ENDS.get(config.text("model_type") or "")
    return _token_ids(config.with_defaults({"eos_token_id": default}), "eos_token_id")


def _around(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return what the post-processor puts before and behind a plain text.

    As in transformers 5, `add_bos_token` and `add_eos_token` of tokenizer_config.json say nothing beside it.
    """
    plain, whole = (tokenizer.encode("a", add_special_tokens=adds).ids for adds in (False, True))
    at = next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), len(whole))
    return tuple(whole[:at]), tuple(whole[at + len(plain) :])


def _chat_templates(folder: Path, config: JsonFields) -> dict[str, str]:
    """By name: those that files of their own have, else that of tokenizer_config, or the named ones that it lists."""
    files = {name: folder / path for name, path in _TEMPLATE_FILES.items() if (folder / path).exists()}
    if files:
        return {name: _text(path) for name, path in files.items()}
    given = config.get("chat_template")
    if not isinstance(given, list):
        given = [] if given is None else [{"name": "default", "template": given}]
    named = {item.get("name"): item.get("template") for item in given if isinstance(item, dict)}
    templates: dict[str, str] = {}
    for name in _TEMPLATE_FILES:
        if isinstance(template := named.get(name), str):
            templates[name] = template
        elif template is not None:
            raise damaged(config.path, "chat_template is neither a text nor a list of named texts")
    return templates


def _text(path: Path) -> str:
    try:
        return read_bounded(path, MAX_SMALL_FILE_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise damaged(path, "it is not UTF-8") from error


def _response_template(config: JsonFields) -> str | None:
    """Schedulers say whether they can read it."""
    template = config.get("response_template")
    if template is None:
        return None
    text = json.dumps(template)
    if len(text) > MAX_RESPONSE_TEMPLATE_CHARS:
        raise damaged(config.path, f"response_template has {len(text)} characters, a template has few")
    return text


def _defaults(generation: JsonFields) -> GenerationDefaults:
    top_k, top_p = generation.number("top_k"), generation.number("top_p")
    try:
        return GenerationDefaults(
            temperature=generation.number("temperature"),
            top_p=_LEAST_TOP_P if top_p == 0 else top_p,
            top_k=None if top_k is None else max(int(top_k), 0),  # some write -1 for no limit
            min_p=generation.number("min_p"),
            repetition_penalty=generation.number("repetition_penalty"),
        )
    except ValueError as error:
        raise wrong(generation.path, f"its {error}") from error

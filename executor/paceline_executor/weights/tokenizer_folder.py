"""A tokenizer out of a Hugging Face folder: tokenizer.json and the small files beside it.

Knows the fields of tokenizer_config.json and generation_config.json that matter for serving. Reads JSON and jinja2
source only: no pickle, no tokenizer class, no code out of the folder. It does not know weights.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from paceline_executor.weights.refusals import damaged, shown, unreadable
from paceline_executor.weights.tokenizer import (
    END_TOKEN_TEXTS,
    GenerationDefaults,
    SpecialTokens,
    TokenizerBundle,
    make_bundle,
)

MAX_TOKENIZER_BYTES = 256 << 20
MAX_SMALL_FILE_BYTES = 4 << 20
MAX_NUMBER = 1 << 63
MAX_TOKEN_ID = 1 << 31


def tokenizer_from_folder(folder: Path) -> TokenizerBundle:
    """Build the bundle. Raises ModelNotFoundError without a tokenizer.json, ModelCorruptError naming file and field."""
    path = folder / "tokenizer.json"
    data = _read(path, MAX_TOKENIZER_BYTES)
    tokenizer = _parse_tokenizer(path, data)
    config = _Fields.read(folder / "tokenizer_config.json")
    generation = _Fields.read(folder / "generation_config.json")
    special = _special_tokens(tokenizer, config, generation)
    return make_bundle(data, _chat_template(folder, config), special, _defaults(generation))


def _read(path: Path, max_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise unreadable(path, error) from error
    if len(data) > max_bytes:
        raise damaged(path, f"it is larger than the {max_bytes} bytes allowed")
    return data


def _parse_tokenizer(path: Path, data: bytes) -> Tokenizer:
    try:
        return Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises nothing narrower
        raise damaged(path, f"the tokenizers library refuses it ({shown(str(error))})") from error


class _Fields:
    """One small JSON file; every lookup checks the type and names file and field. An absent file has no fields."""

    def __init__(self, path: Path, fields: Mapping[str, Any]) -> None:
        self.path = path
        self._fields = fields

    @classmethod
    def read(cls, path: Path) -> "_Fields":
        if not path.exists():
            return cls(path, {})
        try:
            fields = json.loads(_read(path, MAX_SMALL_FILE_BYTES))
        except (ValueError, RecursionError) as error:
            raise damaged(path, "it is not JSON") from error
        if not isinstance(fields, dict):
            raise damaged(path, "it is not a JSON object")
        return cls(path, fields)

    def get(self, name: str) -> Any:  # noqa: ANN401 (JSON: the caller checks)
        return self._fields.get(name)

    def flag(self, name: str) -> bool | None:
        value = self._fields.get(name)
        if value is None or isinstance(value, bool):
            return value
        raise damaged(self.path, f"{name} is not true or false")

    def number(self, name: str) -> float | None:
        value = self._fields.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is None or (is_number and abs(value) < MAX_NUMBER):  # NaN is not below anything
            return value
        raise damaged(self.path, f"{name} is not a finite number")

    def token_text(self, name: str) -> str | None:
        """A special token, written as its text or as an object with the text under `content`."""
        value = self._fields.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if text is None or isinstance(text, str):
            return text
        raise damaged(self.path, f"{name} is not a token")

    def token_ids(self, name: str) -> list[int]:
        """One id, a list of ids, or none. They may lie beyond the tokenizer's own: models embed more than it knows."""
        value = self._fields.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if all(type(token_id) is int and 0 <= token_id < MAX_TOKEN_ID for token_id in ids):
            return ids
        raise damaged(self.path, f"{name} is neither a token id nor a list of them")


def _special_tokens(tokenizer: Tokenizer, config: _Fields, generation: _Fields) -> SpecialTokens:
    def role(name: str) -> int | None:
        text = config.token_text(name)
        token_id = None if text is None else tokenizer.token_to_id(text)
        if text is not None and token_id is None:
            raise damaged(config.path, f"{name} {shown(text)} is not in the vocabulary")
        return token_id

    bos, eos = role("bos_token"), role("eos_token")
    listed = generation.token_ids("eos_token_id")
    added = tokenizer.get_added_tokens_decoder()
    found = [token_id for token_id, token in sorted(added.items()) if token.content in END_TOKEN_TEXTS]
    ends = [*([] if eos is None else [eos]), *listed, *found]
    return SpecialTokens(
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=role("pad_token"),
        end_token_ids=tuple(dict.fromkeys(ends)),
        add_bos=bos is not None and _adds_bos(tokenizer, config, bos),
    )


def _adds_bos(tokenizer: Tokenizer, config: _Fields, bos: int) -> bool:
    """What the configuration says, else what the tokenizer's post-processor does."""
    stated = config.flag("add_bos_token")
    return tokenizer.encode("a").ids[:1] == [bos] if stated is None else stated


def _chat_template(folder: Path, config: _Fields) -> str | None:
    """chat_template.jinja where there is one, else the template, or the one named "default", of tokenizer_config."""
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return _read(path, MAX_SMALL_FILE_BYTES).decode("utf-8")
        except UnicodeDecodeError as error:
            raise damaged(path, "it is not UTF-8") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    if template is None or isinstance(template, str):
        return template
    raise damaged(config.path, "chat_template is neither a text nor a list of named texts")


def _defaults(generation: _Fields) -> GenerationDefaults:
    top_k = generation.number("top_k")
    try:
        return GenerationDefaults(
            generation.number("temperature"), generation.number("top_p"), None if top_k is None else int(top_k)
        )
    except ValueError as error:
        raise damaged(generation.path, f"its {error}") from error

"""Which tokenizers are read and encode in our own processes: those made of parts whose work is known to be bounded.

A normaliser may make megabytes of each letter, and an expression may try every way to cut a text; no deadline ends that
in a thread. So these take what is listed here, which is what models have; any other tokenizer encodes in a confined
process. The parts are those of the tokenizers library's `tokenizer.json`.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

from paceline.plan.split_patterns import SPLIT_PATTERNS

_Fields = dict[str, Any]
MAX_TOKEN_ID = (1 << 22) - 1
"""What tokens spell is a list: one number in a damaged file must not make it one of gigabytes."""

_MAX_BYTES = 64 << 20
_MAX_WORDS = 1 << 20  # of a vocabulary: reading it keeps all Python threads waiting
_MAX_PARTS = 16
_MAX_WORD_CHARS = 16  # of what a part puts in or looks for
_MAX_GROWTH = 64  # of a text, by all normalisers together


def is_plain(data: bytes) -> bool:
    """`data` is the whole file."""
    if len(data) > _MAX_BYTES:
        return False
    try:
        tokenizer = json.loads(data)
        return (
            _is_plain_model(tokenizer["model"])
            and max((token["id"] for token in tokenizer.get("added_tokens") or ()), default=0) <= MAX_TOKEN_ID
            and all(_are_plain(tokenizer.get(place), kinds) for place, kinds in _KINDS.items())
        )
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return False


def _is_plain_model(model: _Fields) -> bool:
    around = (model.get("continuing_subword_prefix"), model.get("end_of_word_suffix"))
    vocabulary = model["vocab"]
    return (
        model["type"] in ("BPE", "WordLevel")
        and not model.get("dropout")
        and max(len(vocabulary), len(model.get("merges", ()))) <= _MAX_WORDS
        and max(vocabulary.values(), default=0) <= MAX_TOKEN_ID
        and all(len(text or "") <= _MAX_WORD_CHARS for text in around)
    )


def _are_plain(part: _Fields | None, kinds: dict[str, Callable[[_Fields], float]]) -> bool:
    growth, num_parts = 1.0, 0
    for each in _parts(part):
        num_parts += 1
        growth *= kinds[each["type"]](each)
    return num_parts <= _MAX_PARTS and growth <= _MAX_GROWTH


def _parts(part: _Fields | None) -> Iterator[_Fields]:
    if part is None:
        return
    if part["type"] == "Sequence":
        for inner in next(
            part[name] for name in ("normalizers", "pretokenizers", "processors", "decoders") if name in part
        ):
            yield from _parts(inner)
    else:
        yield part


def _alike(_: _Fields) -> float:
    """The text stays about as long."""
    return 1.0


def _prepends(part: _Fields) -> float:
    return 1.0 if len(part["prepend"]) <= _MAX_WORD_CHARS else float("inf")


def _replaces(part: _Fields) -> float:
    pattern, content = part["pattern"]["String"], part["content"]
    if not 0 < len(pattern) <= _MAX_WORD_CHARS:
        raise ValueError
    return max(1.0, len(content) / len(pattern))


def _splits(part: _Fields) -> float:
    pattern = part["pattern"]
    known = pattern["Regex"] in SPLIT_PATTERNS if "Regex" in pattern else 0 < len(pattern["String"]) <= _MAX_WORD_CHARS
    return 1.0 if known else float("inf")


_KINDS: dict[str, dict[str, Callable[[_Fields], float]]] = {
    "normalizer": {
        **dict.fromkeys(("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Strip", "ByteLevel"), _alike),
        "Prepend": _prepends,
        "Replace": _replaces,
    },
    "pre_tokenizer": {
        **dict.fromkeys(("ByteLevel", "Digits", "Metaspace", "Punctuation", "Whitespace", "WhitespaceSplit"), _alike),
        "Split": _splits,
    },
    # Prompts are encoded without what it adds.
    "post_processor": dict.fromkeys(("TemplateProcessing", "ByteLevel"), _alike),
    # Of a decoder nothing but what it says of itself is used: see `detokenizer`.
    "decoder": dict.fromkeys(("ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip"), _alike),
}

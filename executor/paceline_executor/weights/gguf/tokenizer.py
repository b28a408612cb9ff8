"""A tokenizer out of a GGUF file's `tokenizer.ggml.*` keys.

Knows two vocabulary models, as docs/gguf.md of the ggml project names them: `gpt2`, byte-level BPE with listed merges,
and `llama`, SentencePiece BPE whose merges follow from the tokens' scores. Where the keys leave something open it does
what llama.cpp does, whose format this is.
"""

import enum
from dataclasses import dataclass

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE

from paceline.plan.sampling import GenerationDefaults
from paceline_executor.weights.gguf.header import GgufHeader
from paceline_executor.weights.gguf.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from paceline_executor.weights.refusals import shown, unsupported, wrong
from paceline_executor.weights.tokenizer import (
    END_TOKEN_TEXTS,
    SpecialTokens,
    TokenizerBundle,
    make_bundle,
)

MAX_ADDED_TOKENS = 1 << 16
MAX_TOKEN_CHARS = 1024
MAX_SCORED_CHARS = 1 << 22  # of all tokens; deriving merges looks at every place in every token
MAX_CHAT_TEMPLATE_CHARS = 1 << 20
_ALL_BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
_TEMPLATE_NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_TOKENS = "tokenizer.ggml.tokens"
SPACE_LETTER = "\u2581"  # how SentencePiece writes a space


class TokenType(enum.IntEnum):
    """Numbers are those of llama.cpp's llama_token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """By id, each once; the ids with a role lie inside."""

    tokens: tuple[str, ...]
    types: tuple[int, ...]
    ids: dict[str, int]
    special: SpecialTokens


def tokenizer_from_gguf(header: GgufHeader) -> TokenizerBundle:
    """Raises ModelCorruptError or UnsupportedModelError, naming the key or token at fault."""
    kind = header.text("tokenizer.ggml.model")
    if kind == "gpt2":
        name = header.text("tokenizer.ggml.pre", "default")
        pre_tokenizer = PRE_TOKENIZERS.get(name)
        if pre_tokenizer is None:
            raise unsupported(header.path, f"its pre-tokenizer {shown(name)} is not known")
        vocabulary = _read_vocabulary(header, add_bos=pre_tokenizer.add_bos)
        tokenizer = _byte_level(header, vocabulary, pre_tokenizer)
    elif kind == "llama":
        vocabulary = _read_vocabulary(header, add_bos=True)
        tokenizer = _sentence_piece(header, vocabulary)
    else:
        raise unsupported(header.path, f"its tokenizer model {shown(kind)} is neither 'gpt2' nor 'llama'")
    _register_added_tokens(header, vocabulary, tokenizer)
    templates = [_chat_template(header, f"tokenizer.chat_template{name}") for name in ("", ".tool_use")]
    return make_bundle(
        tokenizer.to_str().encode(), templates[0], vocabulary.special, _defaults(header), tool_use_template=templates[1]
    )


def _read_vocabulary(header: GgufHeader, *, add_bos: bool) -> _Vocabulary:
    tokens = header.strings(_TOKENS)
    ids = {token: index for index, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        raise wrong(header.path, f"{_TOKENS} lists a token twice")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is not None and len(tokens) > embedding.shape[0]:
        raise wrong(header.path, f"{_TOKENS} has {len(tokens)}, and the model embeds {embedding.shape[0]}")
    longest = max((len(token) for token in tokens), default=0)
    if longest > MAX_TOKEN_CHARS:
        raise wrong(header.path, f"{_TOKENS} has one of {longest} characters, which is too long")
    types = _token_types(header, len(tokens))
    return _Vocabulary(tokens, types, ids, _special_tokens(header, tokens, types, add_bos=add_bos))


def _token_types(header: GgufHeader, num_tokens: int) -> tuple[int, ...]:
    if "tokenizer.ggml.token_type" not in header.metadata:
        return (TokenType.NORMAL,) * num_tokens
    types = header.numbers("tokenizer.ggml.token_type")
    if types.size != num_tokens:
        raise wrong(header.path, f"tokenizer.ggml.token_type has {types.size} values for {num_tokens} tokens")
    return tuple(types.tolist())


def _special_tokens(
    header: GgufHeader, tokens: tuple[str, ...], types: tuple[int, ...], *, add_bos: bool
) -> SpecialTokens:
    ids = {role: _token_id(header, role, len(tokens)) for role in ("eot", "eom", *_TEMPLATE_NAMES)}
    named = [ids["eos"], ids["eot"], ids["eom"]]
    markers = (TokenType.CONTROL, TokenType.USER_DEFINED)
    found = [i for i, text in enumerate(tokens) if text in END_TOKEN_TEXTS and types[i] in markers]
    around = {
        "bos": header.flag("tokenizer.ggml.add_bos_token", add_bos and ids["bos"] is not None),
        "eos": header.flag("tokenizer.ggml.add_eos_token", False),
    }
    for role, is_added in around.items():
        if is_added and ids[role] is None:
            raise wrong(header.path, f"tokenizer.ggml.add_{role}_token is true and there is no {role}_token_id")
    return SpecialTokens(
        bos_token_id=ids["bos"],
        eos_token_id=ids["eos"],
        end_token_ids=tuple(dict.fromkeys([*(i for i in named if i is not None), *found])),
        prefix_token_ids=_id_if(around["bos"], ids["bos"]),
        suffix_token_ids=_id_if(around["eos"], ids["eos"]),
        names=tuple((_TEMPLATE_NAMES[role], tokens[i]) for role in _TEMPLATE_NAMES if (i := ids[role]) is not None),
    )


def _id_if(is_added: bool, token_id: int | None) -> tuple[int, ...]:
    return (token_id,) if is_added and token_id is not None else ()


def _token_id(header: GgufHeader, role: str, num_tokens: int) -> int | None:
    key = f"tokenizer.ggml.{role}_token_id"
    if key not in header.metadata:
        return None
    token_id = header.integer(key)
    if 0 <= token_id < num_tokens:
        return token_id
    if role == "eos":
        raise wrong(header.path, f"{key} is {token_id} in a vocabulary of {num_tokens}")
    return None  # as llama.cpp has it: writers put -1 or 2^32 - 1 for a role that no token has


def _byte_level(header: GgufHeader, vocabulary: _Vocabulary, pre_tokenizer: PreTokenizer) -> Tokenizer:
    merges = []
    key = "tokenizer.ggml.merges"
    for text in header.strings(key):
        cut = text.find(" ", 1)  # a part may itself begin with a space, never be empty
        left, right = text[:cut], text[cut + 1 :]
        if cut < 0 or not {left, right, left + right} <= vocabulary.ids.keys():
            raise wrong(header.path, f"{key} has {shown(text)}, which does not lead from two tokens to a third")
        merges.append((left, right))
    model = BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=pre_tokenizer.ignore_merges)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(header: GgufHeader, vocabulary: _Vocabulary) -> Tokenizer:
    unknown_id = _token_id(header, "unknown", len(vocabulary.tokens))
    if unknown_id is None and not vocabulary.ids.keys() >= _ALL_BYTES:
        # The library would leave out what it cannot encode, and say nothing.
        raise wrong(header.path, f"{_TOKENS} has neither an unknown token nor one for each of the 256 bytes")
    model = BPE(
        vocab=vocabulary.ids,
        merges=_merges_by_score(header, vocabulary),
        fuse_unk=True,
        byte_fallback=True,
        unk_token=None if unknown_id is None else vocabulary.tokens[unknown_id],
    )
    tokenizer = Tokenizer(model)
    add_prefix = header.flag("tokenizer.ggml.add_space_prefix", True)
    # As llama.cpp does, the prefix goes before every stretch of text, also behind a special token.
    prefix = [normalizers.Prepend(SPACE_LETTER)] if add_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE_LETTER)])
    strip = [decoders.Strip(content=" ", left=1)] if add_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_LETTER, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_by_score(header: GgufHeader, vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """The best score of the result comes first.

    SentencePiece merges whichever neighbours form the best-scored token; a list in this order does the same.
    """
    scores = header.numbers("tokenizer.ggml.scores")
    if scores.size != len(vocabulary.tokens) or not np.isfinite(scores).all():
        raise wrong(header.path, "tokenizer.ggml.scores is not one finite number for each token")
    if sum(map(len, vocabulary.tokens)) > MAX_SCORED_CHARS:
        raise wrong(header.path, f"{_TOKENS} has more than the {MAX_SCORED_CHARS} characters allowed")
    mergeable = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
    parts = {token for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind in mergeable}
    ranked = [
        (-score, -cut, token[:cut], token[cut:])
        for token, score in zip(vocabulary.tokens, scores.tolist(), strict=True)
        if token in parts
        for cut in range(1, len(token))
        if token[:cut] in parts and token[cut:] in parts
    ]
    ranked.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in ranked]


def _register_added_tokens(header: GgufHeader, vocabulary: _Vocabulary, tokenizer: Tokenizer) -> None:
    """Control tokens, and the user-defined ones of the file, match whole."""
    special = vocabulary.special
    always = {*special.end_token_ids, special.bos_token_id}
    added = []
    for token_id, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        is_special = kind in (TokenType.CONTROL, TokenType.UNKNOWN) or token_id in always
        if text and (is_special or kind == TokenType.USER_DEFINED):
            added.append(AddedToken(text, special=is_special, normalized=False))
    if len(added) > MAX_ADDED_TOKENS:
        raise unsupported(header.path, f"its vocabulary has more than {MAX_ADDED_TOKENS} control tokens")
    tokenizer.add_tokens(added)


def _chat_template(header: GgufHeader, key: str) -> str | None:
    if key not in header.metadata:
        return None
    template = header.text(key)
    if len(template) > MAX_CHAT_TEMPLATE_CHARS:
        raise unsupported(header.path, f"its {key} has more than {MAX_CHAT_TEMPLATE_CHARS} characters")
    return template


def _defaults(header: GgufHeader) -> GenerationDefaults:
    def value(name: str) -> float | None:
        key = f"general.sampling.{name}"
        return header.number(key) if key in header.metadata else None

    top_k = value("top_k")
    try:
        return GenerationDefaults(
            temperature=value("temp"),
            top_p=value("top_p"),
            top_k=None if top_k is None else int(top_k),
            min_p=value("min_p"),
            repetition_penalty=value("penalty_repeat"),
        )
    except ValueError as error:
        raise wrong(header.path, f"general.sampling: {error}") from error

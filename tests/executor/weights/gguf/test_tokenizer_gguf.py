"""A GGUF's tokenizer encodes as independent implementations do, and gives back the text it was given."""

import itertools
import json
import os
from dataclasses import replace

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from paceline_executor.errors import ModelCorruptError, UnsupportedModelError
from paceline_executor.link.tokenizer import tokenizer_digest
from paceline_executor.weights import GenerationDefaults, load_tokenizer
from random_models import (
    BYTE_LETTERS,
    RandomCheckpoint,
    byte_level_metadata,
    default_model_path,
    gguf_parts,
)

TEXTS = [
    "",
    " ",
    "Hello world! 123",
    "The quick brown fox doesn't jump; IT'S lazy, they'LL say.",
    "x = 1234567890 and 3.14159, 12 34 abc123def 9",
    "Café déjà vu, naïve coöperation",
    "  multiple   spaces\tand\ttabs  ",
    "\t\n\r\n  def f(x):\n    return x ** 2  # ¿qué?\n\n\n",
    "日本語のテキスト 2024年 — Ελληνικά кириллица العربية",
    "👩‍👩‍👧‍👦 family 🇫🇷 flag \u200b\u00a0 joiners",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|>",
    "<|im_start|<|im_end|>|>",
    "a" * 300,
    "\x00\x7f\u0085\u2028",
]


def tokenizer_of(bundle):
    """The library's tokenizer, as another process would rebuild it."""
    return Tokenizer.from_str(bundle.tokenizer_json.decode())


def encode(tokenizer, text):
    """Ids without what a post-processor might add, as `TokenizerBundle` asks."""
    return tokenizer.encode(text, add_special_tokens=False).ids


def bundle_of(tmp_path, metadata):
    """The bundle of a file with this tokenizer metadata and an embedding wide enough for it."""
    parts = gguf_parts(RandomCheckpoint())
    parts.tensors.clear()
    parts.metadata = {"general.architecture": "llama", **metadata}
    return load_tokenizer(parts.write(tmp_path / "tokenizer.gguf"))


@pytest.fixture(scope="module")
def real():
    """The default model's bundle."""
    return load_tokenizer(default_model_path(os.environ))


@pytest.fixture(scope="module")
def real_tokenizer(real):
    """The same, ready to encode."""
    return tokenizer_of(real)


@pytest.fixture(scope="module")
def oracle():
    """What transformers makes of the default model's file.

    It cuts text as GPT-2 does whatever `tokenizer.ggml.pre` says here; the digits are split as this model's own
    tokenizer.json splits them.
    """
    from transformers import AutoTokenizer

    path = default_model_path(os.environ)
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name).backend_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return tokenizer


@pytest.mark.slow  # transformers reads the file for seconds; `test_real_model` has what it made of ten prompts
@pytest.mark.parametrize("text", TEXTS)
def test_the_default_model_encodes_as_transformers_does(real_tokenizer, oracle, text):
    assert encode(real_tokenizer, text) == encode(oracle, text)


@pytest.mark.slow
@given(text=st.text(st.characters(codec="utf-8")) | st.text("aA 's09\n½٣é<|>", max_size=30))
def test_any_text_encodes_as_transformers_does(real_tokenizer, oracle, text):
    assert encode(real_tokenizer, text) == encode(oracle, text)


@given(
    text=st.sampled_from(TEXTS[:-1]) | st.text(st.characters(codec="utf-8", min_codepoint=0x20, max_codepoint=0x1FFFF))
)
def test_text_comes_back_from_its_ids(real_tokenizer, text):
    """Losslessly; only bytes that the vocabulary lacks (some control characters, private planes) are dropped."""
    assert real_tokenizer.decode(encode(real_tokenizer, text), skip_special_tokens=False) == text


def test_the_default_model_names_its_special_tokens(real, real_tokenizer):
    """Both its end tokens end a generation, though the file names one."""
    assert (real.bos_token_id, real.eos_token_id) == (1, 2)
    assert real.end_token_ids == (2, 0)
    assert real.prefix_token_ids == real.suffix_token_ids == ()
    assert {"bos_token": "<|im_start|>", "pad_token": "<|im_end|>"}.items() <= dict(real.special_tokens).items()
    assert real.defaults == GenerationDefaults()
    assert real.chat_template is not None
    assert "<|im_start|>" in real.chat_template
    assert encode(real_tokenizer, "<|im_start|>") == [1]
    assert real_tokenizer.decode([1, 2, 19556], skip_special_tokens=True) == "Hello"


def test_equal_files_have_equal_digests(tmp_path, real):
    def digest(**changed):
        keys = {f"tokenizer.{name}": value for name, value in changed.items()}
        return tokenizer_digest(bundle_of(tmp_path, byte_level_metadata() | keys))

    assert digest() == digest() != tokenizer_digest(real)
    assert digest() != digest(**{"ggml.add_bos_token": True})
    assert digest() != digest(chat_template="x")
    assert digest(chat_template="x") != digest(**{"chat_template": "x", "chat_template.tool_use": "y"})


def test_a_file_may_have_a_template_of_its_own_for_chats_with_tools(tmp_path):
    named = {
        "tokenizer.chat_template": "d",
        "tokenizer.chat_template.tool_use": "t",
        "tokenizer.chat_template.rag": "r",
    }
    bundle = bundle_of(tmp_path, byte_level_metadata() | named)
    assert (bundle.chat_template, bundle.tool_use_template) == ("d", "t")


def test_a_role_that_no_token_has_refuses_no_file(tmp_path):
    """As llama.cpp has it: writers put -1 and 2^32 - 1 there."""
    roles = {f"tokenizer.ggml.{role}_token_id": 2**32 - 1 for role in ("bos", "padding", "unknown", "eot", "eom")}
    ends = bundle_of(tmp_path, byte_level_metadata()).end_token_ids
    bundle = bundle_of(tmp_path, byte_level_metadata() | roles)
    assert (bundle.bos_token_id, bundle.prefix_token_ids, bundle.end_token_ids) == (None, (), ends)


def test_an_end_token_goes_behind_prompts_where_the_file_asks_for_it(tmp_path):
    bundle = bundle_of(tmp_path, byte_level_metadata() | {"tokenizer.ggml.add_eos_token": True})
    assert bundle.suffix_token_ids == (bundle.eos_token_id,)


# As in llama.cpp's llama-vocab.cpp: each expression cuts every piece that the one before it left.
GPT2_EXPRESSION = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
EXPRESSIONS = {
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2_EXPRESSION, r"\p{N}+", r"[0-9][0-9][0-9]"],
    "gpt-2": [GPT2_EXPRESSION],
    "smollm": [r"\p{N}", GPT2_EXPRESSION],
    "llama-bpe": [CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + REST],
    "qwen2": [CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + REST],
    # llama.cpp writes the cases of letters as [^a-z] and [^A-Z], which differs outside of ASCII; Mistral's files say:
    "tekken": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
}


def pieces_by_llama_cpp(text, expressions):
    """How llama.cpp cuts text before merging, with another regular-expression engine."""
    pieces = [text] if text else []
    for expression in expressions:
        cut = []
        for piece in pieces:
            end = 0
            for match in regex.finditer(expression, piece):
                cut += [piece[end : match.start()], match.group()]
                end = match.end()
            cut.append(piece[end:])
        pieces = [piece for piece in cut if piece]
    return pieces


@pytest.fixture(scope="module")
def pre_tokenizer_by_name(tmp_path_factory):
    """The pre-tokenizers, each out of a tokenizer built for its name."""
    folder = tmp_path_factory.mktemp("pre")
    return {name: tokenizer_of(bundle_of(folder, byte_level_metadata(pre=name))).pre_tokenizer for name in EXPRESSIONS}


@pytest.mark.parametrize("name", EXPRESSIONS)
@given(text=st.sampled_from(TEXTS) | st.text("aZé日 \t\n\r'stLl09½٣_-$=<|", max_size=24))
def test_text_is_cut_as_llama_cpp_cuts_it(pre_tokenizer_by_name, name, text):
    """Piece for piece, for every pre-tokenizer known by name."""
    found = [text[start:end] for _, (start, end) in pre_tokenizer_by_name[name].pre_tokenize_str(text)]
    assert found == pieces_by_llama_cpp(text, EXPRESSIONS[name])


def trained_merges(count=200):
    """Merges as a real tokenizer has them, learned from the texts above."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=256 + count, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "qwen2"])
def test_merges_apply_as_in_transformers(tmp_path, name):
    from transformers import AutoTokenizer

    tokenizer = tokenizer_of(bundle_of(tmp_path, byte_level_metadata(trained_merges(), pre=name)))
    oracle = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file="tokenizer.gguf").backend_tokenizer
    for text in TEXTS:
        assert encode(tokenizer, text) == encode(oracle, text), text


def test_a_llama3_piece_that_is_a_token_is_taken_whole(tmp_path):
    metadata = byte_level_metadata(["h e"], pre="llama-bpe")
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "hello"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1]
    assert len(encode(tokenizer_of(bundle_of(tmp_path, metadata)), "hello")) == 1
    metadata["tokenizer.ggml.pre"] = "qwen2"
    assert len(encode(tokenizer_of(bundle_of(tmp_path, metadata)), "hello")) == 4


PIECES = [*"helowrd▁", "he", "ll", "▁w", "or", "llo", "hello", "▁hello", "▁world", "▁▁", "rl"]


def sentence_piece_metadata():
    """<unk>, <s>, </s>, a user-defined token, the 256 bytes, then pieces, the better the longer."""
    tokens = ["<unk>", "<s>", "</s>", "<tool>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, 4, *[6] * 256, *[1] * len(PIECES)],
        "tokenizer.ggml.scores": [0.0] * 260 + [len(piece) - index / 100 for index, piece in enumerate(PIECES)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def ids_by_llama_cpp(text, metadata, prefix="▁"):
    """SentencePiece encoding as llama.cpp does it: always merge the neighbours that form the best token, left first."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    symbols = list((prefix + text.replace(" ", "▁")) if text else "")
    while True:
        joined = [left + right for left, right in itertools.pairwise(symbols)]
        known = [(-scores[tokens.index(pair)], place) for place, pair in enumerate(joined) if pair in tokens[260:]]
        if not known:
            break
        place = min(known)[1]
        symbols[place : place + 2] = [joined[place]]
    ids = []
    for symbol in symbols:
        names = [symbol] if symbol in tokens else [f"<0x{byte:02X}>" for byte in symbol.encode()]
        ids += [tokens.index(name) for name in names]
    return ids


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory):
    """A SentencePiece tokenizer out of a GGUF."""
    return tokenizer_of(bundle_of(tmp_path_factory.mktemp("spm"), sentence_piece_metadata()))


@given(text=st.text("helowrd ", max_size=20) | st.text("héo 日\n", max_size=8))
def test_sentence_piece_encodes_as_llama_cpp_does(sentence_piece, text):
    ids = encode(sentence_piece, text)
    assert ids == ids_by_llama_cpp(text, sentence_piece_metadata())
    assert sentence_piece.decode(ids) == text


@pytest.mark.parametrize("text", ["hello world", "hell", "日本 hello", "<s>", "wor\nld", "hello  world"])
def test_sentence_piece_encodes_as_transformers_does(tmp_path, text):
    """Where the two agree on the prefix space: text that neither starts with a space nor follows a special token."""
    from transformers import AutoTokenizer

    tokenizer = tokenizer_of(bundle_of(tmp_path, sentence_piece_metadata()))
    oracle = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file="tokenizer.gguf").backend_tokenizer
    assert encode(tokenizer, text) == encode(oracle, text)


def test_sentence_piece_defaults_are_those_of_the_format(tmp_path):
    """bos goes first unless the file says otherwise; user-defined tokens match whole but are text."""
    bundle = bundle_of(tmp_path, sentence_piece_metadata())
    assert bundle.prefix_token_ids == (1,)
    assert bundle.end_token_ids == (2,)
    tokenizer = tokenizer_of(bundle)
    assert encode(tokenizer, "<tool>") == [3]
    assert tokenizer.decode([1, 3, 2], skip_special_tokens=True) == "<tool>"


def test_sentence_piece_leaves_the_prefix_space_out_where_told(tmp_path):
    metadata = sentence_piece_metadata() | {"tokenizer.ggml.add_space_prefix": False}
    tokenizer = tokenizer_of(bundle_of(tmp_path, metadata))
    ids = encode(tokenizer, " hello")
    assert [tokenizer.id_to_token(token_id) for token_id in ids] == ["▁hello"]
    assert tokenizer.decode(ids) == " hello"


def gemma_metadata():
    """As Gemma's: no prefix space, and runs of white space that stand for themselves."""
    metadata = sentence_piece_metadata() | {"tokenizer.ggml.add_space_prefix": False}
    runs = ["\n\n", "\n", "   "]
    return metadata | {
        "tokenizer.ggml.tokens": [*metadata["tokenizer.ggml.tokens"], *runs],
        "tokenizer.ggml.token_type": [*metadata["tokenizer.ggml.token_type"], *[4] * len(runs)],
        "tokenizer.ggml.scores": [*metadata["tokenizer.ggml.scores"], *[0.0] * len(runs)],
    }


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """A tokenizer like Gemma's out of a GGUF."""
    return tokenizer_of(bundle_of(tmp_path_factory.mktemp("gemma"), gemma_metadata()))


@given(text=st.text("helowrd \n", max_size=20) | st.text("héo 日\n", max_size=8))
def test_a_gemma_vocabulary_encodes_as_llama_cpp_does(gemma, text):
    metadata = gemma_metadata()
    expected = []
    for fragment in regex.split(r"(\n\n|\n|   )", text):
        tokens = metadata["tokenizer.ggml.tokens"]
        is_token = fragment in tokens[-3:]
        expected += [tokens.index(fragment)] if is_token else ids_by_llama_cpp(fragment, metadata, prefix="")
    ids = encode(gemma, text)
    assert ids == expected
    assert gemma.decode(ids, skip_special_tokens=False) == text


def test_end_tokens_come_from_ids_and_names(tmp_path):
    metadata = byte_level_metadata()
    eot = metadata["tokenizer.ggml.tokens"].index(BYTE_LETTERS[10])
    bundle = bundle_of(tmp_path, metadata | {"tokenizer.ggml.eot_token_id": eot, "tokenizer.ggml.eom_token_id": 2})
    assert bundle.end_token_ids == (2, eot, 0)


def test_generation_defaults_are_read_where_the_file_names_them(tmp_path):
    named = {"temp": 0.5, "top_k": 20, "min_p": 0.25, "penalty_repeat": 1.125}
    metadata = byte_level_metadata() | {f"general.sampling.{name}": value for name, value in named.items()}
    expected = GenerationDefaults(temperature=0.5, top_k=20, min_p=0.25, repetition_penalty=1.125)
    assert bundle_of(tmp_path, metadata).defaults == expected


CORRUPT = {
    "tokenizer.ggml.merges": (["h e", "x yz"], r"tokenizer\.ggml\.merges has 'x yz', which does not lead"),
    "tokenizer.ggml.eos_token_id": (262, "eos_token_id is 262 in a vocabulary of 262"),
    "tokenizer.ggml.token_type": ([1, 2], r"tokenizer\.ggml\.token_type has 2 values for 262 tokens"),
    "tokenizer.ggml.tokens": (["a", "a"], r"tokenizer\.ggml\.tokens lists a token twice"),
    "general.sampling.top_p": (1.5, r"general\.sampling: top_p 1\.5 is outside the range above 0"),
    "tokenizer.ggml.add_bos_token": ("yes", "add_bos_token is not true or false"),
}
UNSUPPORTED = {
    "tokenizer.ggml.model": ("bert", "its tokenizer model 'bert'"),
    "tokenizer.ggml.pre": ("viking", "its pre-tokenizer 'viking' is not known"),
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
def test_an_impossible_or_unknown_tokenizer_is_named(tmp_path, key, value, error, message):
    """A guess would encode almost right, which is worse than a refusal."""
    with pytest.raises(error, match=message):
        bundle_of(tmp_path, byte_level_metadata() | {key: value})


def test_a_vocabulary_that_would_lose_text_is_refused(tmp_path):
    """What it has no token for needs the unknown token or the 256 bytes."""
    metadata = sentence_piece_metadata()
    del metadata["tokenizer.ggml.unknown_token_id"]
    assert encode(tokenizer_of(bundle_of(tmp_path, metadata)), "日")[-3:] == [4 + byte for byte in "日".encode()]

    metadata["tokenizer.ggml.tokens"][4] = "no byte"
    with pytest.raises(ModelCorruptError, match=r"tokenizer\.ggml\.tokens .* 256 bytes; correct"):
        bundle_of(tmp_path, metadata)


def test_more_tokens_than_embeddings_are_refused(tmp_path):
    """An id without a row in the embedding would end a step."""
    config = replace(RandomCheckpoint().config, vocab_size=200)
    path = gguf_parts(RandomCheckpoint(config)).write(tmp_path / "tiny.gguf")
    with pytest.raises(ModelCorruptError, match=r"tokenizer\.ggml\.tokens has 262, and the model embeds 200; correct"):
        load_tokenizer(path)


def test_scores_are_one_for_each_token(tmp_path):
    with pytest.raises(ModelCorruptError, match="scores is not one finite number for each token; correct"):
        bundle_of(tmp_path, sentence_piece_metadata() | {"tokenizer.ggml.scores": [0.0, 1.0]})

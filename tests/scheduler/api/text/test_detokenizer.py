"""Incremental detokenisation: whole characters only, and the same text however the tokens come."""

import json
from itertools import chain, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from edge_rig.tokenizers import byte_level_tokenizer, sentence_piece_tokenizer
from paceline_scheduler.api.text.detokenizer import Detokenizer, read_spelling
from paceline_scheduler.errors import UnsupportedError

BYTE_LEVEL = byte_level_tokenizer()
SENTENCE_PIECE = sentence_piece_tokenizer()
TORTURE = "a\u0301 é 👩‍👩‍👧‍👦 🏳️‍🌈 \u202eabc\u202c 𝔘𝔫𝔦 \ufffd\ufffd \x00 \r\n\t ﷽ 日本語 नमस्ते ☃ \U0010ffff"


def spelling(tokenizer):
    """What the tokens of a tokenizer spell."""
    return read_spelling(tokenizer, tokenizer.get_vocab_size())


SPELLINGS = {"byte-level": spelling(BYTE_LEVEL), "sentence-piece": spelling(SENTENCE_PIECE)}
TOKENIZERS = {"byte-level": BYTE_LEVEL, "sentence-piece": SENTENCE_PIECE}


def stream(kind, groups, skip_special_tokens=True):
    """The pieces of text that groups of tokens bring, and what the end brings."""
    detokenizer = Detokenizer(SPELLINGS[kind], skip_special_tokens)
    return [detokenizer.take(group) for group in groups], detokenizer.flush()


def split(token_ids, cuts):
    """The tokens in groups that end at the cuts."""
    borders = sorted({cut % (len(token_ids) + 1) for cut in cuts} | {0, len(token_ids)})
    return [token_ids[start:end] for start, end in pairwise(borders)]


def byte_tokens(data):
    return [SENTENCE_PIECE.token_to_id(f"<0x{byte:02X}>") for byte in data]


any_tokens = st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=40)
any_cuts = st.lists(st.integers(0, 40), max_size=8)


@given(any_tokens, any_cuts, st.booleans())
@example(BYTE_LEVEL.encode(TORTURE).ids, [1, 2, 3, 5, 8, 13, 21, 34], True)
def test_byte_level_text_equals_the_librarys_for_any_tokens_in_any_groups(token_ids, cuts, skip_special_tokens):
    """Also for bytes that are no UTF-8."""
    pieces, rest = stream("byte-level", split(token_ids, cuts), skip_special_tokens)
    assert "".join(pieces) + rest == BYTE_LEVEL.decode(token_ids, skip_special_tokens=skip_special_tokens)


words = st.sampled_from(["▁hello", "▁", "▁wor", "ld", "é", "</s>", "<s>", "o"]).map(
    lambda w: [SENTENCE_PIECE.token_to_id(w)]
)
characters = st.characters(codec="utf-8").map(lambda c: byte_tokens(c.encode()))


@given(st.lists(st.one_of(words, characters), max_size=20).map(lambda parts: [*chain(*parts)]), any_cuts, st.booleans())
def test_sentence_piece_text_equals_the_librarys_where_byte_tokens_are_valid(token_ids, cuts, skip_special_tokens):
    pieces, rest = stream("sentence-piece", split(token_ids, cuts), skip_special_tokens)
    assert "".join(pieces) + rest == SENTENCE_PIECE.decode(token_ids, skip_special_tokens=skip_special_tokens)


sentences = st.lists(st.one_of(words, characters), max_size=6).map(lambda parts: [*chain(*parts)])


@given(sentences, sentences, st.booleans())
def test_behind_a_prompt_an_output_is_what_the_library_makes_of_both(prompt, output, skip_special_tokens):
    """Without the prompt its first word would lose its space."""
    decode, spelt = SENTENCE_PIECE.decode, SPELLINGS["sentence-piece"]
    text = spelt.decode(output, skip_special_tokens, before=prompt)
    assert decode(prompt, skip_special_tokens) + text == decode(prompt + output, skip_special_tokens)


@given(st.binary(max_size=20), any_cuts)
def test_invalid_byte_tokens_become_what_unicode_recommends(data, cuts):
    """The library would turn valid characters beside them into U+FFFD as well; here they were already shown."""
    token_ids = byte_tokens(data)
    pieces, rest = stream("sentence-piece", split(token_ids, cuts))
    text = data.decode("utf-8", "replace")
    assert "".join(pieces) + rest == text.removeprefix(" ")


@pytest.mark.parametrize("kind", ["byte-level", "sentence-piece"])
@given(text=st.text(alphabet=st.characters(codec="utf-8"), max_size=30))
@example(text=TORTURE)
def test_no_piece_ends_inside_a_character(kind, text):
    token_ids = TOKENIZERS[kind].encode(text, add_special_tokens=False).ids
    text = TOKENIZERS[kind].decode(token_ids)
    pieces, rest = stream(kind, [[token_id] for token_id in token_ids])
    for length in range(len(pieces)):
        assert text.startswith("".join(pieces[:length]))
    assert ("".join(pieces), rest) == (text, "")


def test_several_leading_spaces_are_stripped_as_far_as_the_decoder_says():
    """Over token borders too, and only before the first other character."""
    tokenizer = Tokenizer.from_str(SENTENCE_PIECE.to_str())
    stages = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 2, 0)]
    tokenizer.decoder = decoders.Sequence(stages)
    space, word = tokenizer.token_to_id("▁"), tokenizer.token_to_id("▁hello")
    for token_ids in ([space, space, space, word], [space, word], [word, word]):
        detokenizer = Detokenizer(spelling(tokenizer), skip_special_tokens=True)
        assert "".join(detokenizer.take([token_id]) for token_id in token_ids) == tokenizer.decode(token_ids)


def test_an_added_token_is_written_as_it_stands():
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken("日 本"), AddedToken("plain")])
    token_ids = tokenizer.encode("x日 本plain").ids
    assert (
        spelling(tokenizer).decode(token_ids, skip_special_tokens=True) == tokenizer.decode(token_ids) == "x日 本plain"
    )


def test_ids_beyond_the_tokenizer_spell_nothing():
    padded = read_spelling(BYTE_LEVEL, BYTE_LEVEL.get_vocab_size() + 3)
    assert padded.decode([BYTE_LEVEL.get_vocab_size() + 2], skip_special_tokens=False) == ""


@pytest.mark.parametrize(
    ("decoder", "name"),
    [
        (decoders.WordPiece(), "WordPiece"),
        (decoders.Sequence([decoders.Replace("_", " "), decoders.ByteFallback(), decoders.Fuse()]), "Replace"),
        (None, "none"),
    ],
)
def test_a_decoder_that_cannot_be_streamed_is_refused_by_name(decoder, name):
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    if decoder is not None:
        tokenizer.decoder = decoder
    with pytest.raises(UnsupportedError, match=name):
        spelling(tokenizer)


def test_the_decoder_is_recognised_inside_a_nested_list():
    state = json.loads(BYTE_LEVEL.to_str())
    state["decoder"] = {"type": "Sequence", "decoders": [state["decoder"]]}
    tokenizer = Tokenizer.from_str(json.dumps(state))
    assert spelling(tokenizer) == SPELLINGS["byte-level"]

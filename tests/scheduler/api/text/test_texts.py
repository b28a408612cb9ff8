"""Prompts to tokens and back: bounds before work, one beginning, long texts off the event loop."""

import asyncio
import os
import subprocess
import sys
import threading
from dataclasses import replace
from datetime import datetime

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders

from edge_rig.tokenizers import (
    byte_level_tokenizer,
    sentence_piece_tokenizer,
    served_model,
    tokenizer_source,
    try_here,
)
from paceline.plan.hashes import TOKENIZER_FORM
from paceline.plan.sampling import GenerationDefaults
from paceline.v1.inference_pb2 import GenerateRequest
from paceline_executor.link.tokenizer import tokenizer_content
from paceline_executor.weights import load_tokenizer
from paceline_scheduler.api.limits import EdgeLimits
from paceline_scheduler.api.text.texts import Texts
from paceline_scheduler.api.text.tokenizer import TextThreads
from paceline_scheduler.backend import TokenizerSource
from paceline_scheduler.errors import InvalidRequestError, QueueFullError, UnsupportedError
from paceline_scheduler.link.wire import decode_tokenizer
from random_models import default_model_path

BYTE_LEVEL = byte_level_tokenizer()
SENTENCE_PIECE = sentence_piece_tokenizer()


def turns(*turns):
    """A chat by who speaks and what is said."""
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


@pytest.fixture
async def texts():
    """Texts with the usual limits."""
    texts = Texts(EdgeLimits(), datetime.now, trial=try_here)
    yield texts
    await texts.close()


def sentence_piece_model(**options):
    """A model that begins texts with <s>."""
    source = tokenizer_source(SENTENCE_PIECE, bos_token="<s>", eos_token="</s>", add_bos=True, **options)
    return served_model(source, vocab_size=SENTENCE_PIECE.get_vocab_size())


async def test_plain_text_gets_the_first_token_once(texts):
    model = sentence_piece_model()
    expected = [SENTENCE_PIECE.token_to_id("<s>"), SENTENCE_PIECE.token_to_id("▁hello")]
    assert (await texts.token_ids(GenerateRequest(text="hello"), model)).tolist() == expected
    assert (await texts.token_ids(GenerateRequest(text="<s>hello"), model)).tolist() == expected


async def test_a_chat_begins_as_its_template_says(texts):
    bos = SENTENCE_PIECE.token_to_id("<s>")
    chat = GenerateRequest(chat=turns(("user", "hello")))
    for template, num_first in (("{{ bos_token }}{{ messages[0].content }}", 1), ("{{ messages[0].content }}", 0)):
        token_ids = (await texts.token_ids(chat, sentence_piece_model(chat_template=template))).tolist()
        assert token_ids.count(bos) == num_first
        assert token_ids[num_first:] == [SENTENCE_PIECE.token_to_id("▁hello")]


@pytest.mark.parametrize(
    ("sent", "seen"),
    [
        ([("user", "hi")], [("system", "Be brief."), ("user", "hi")]),
        ([("system", ""), ("user", "hi")], [("system", ""), ("user", "hi")]),
        ([("user", "hi"), ("system", "no")], [("user", "hi"), ("system", "no")]),
    ],
)
async def test_a_chat_without_a_system_message_gets_the_models_own(texts, sent, seen):
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    source = tokenizer_source(BYTE_LEVEL, chat_template=template)
    model = served_model(replace(source, default_system_text="Be brief."), max_model_len=4096)
    token_ids = (await texts.token_ids(GenerateRequest(chat=turns(*sent)), model)).tolist()
    assert BYTE_LEVEL.decode(token_ids) == "".join(f"{role}:{content};" for role, content in seen)
    text = (await texts.token_ids(GenerateRequest(text="hi"), model)).tolist()
    assert BYTE_LEVEL.decode(text) == "hi"


async def test_a_chat_of_the_default_model_is_tokenised_as_by_its_own_tokenizer(texts):
    bundle = load_tokenizer(default_model_path(os.environ))
    oracle = Tokenizer.from_buffer(bundle.tokenizer_json)
    model = served_model(
        decode_tokenizer(tokenizer_content(bundle), TOKENIZER_FORM), vocab_size=49152, max_model_len=8192
    )

    token_ids = (
        await texts.token_ids(GenerateRequest(chat=turns(("system", "Be brief."), ("user", "Hi ☃"))), model)
    ).tolist()

    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi ☃<|im_end|>\n<|im_start|>assistant\n"
    assert token_ids == oracle.encode(expected, add_special_tokens=False).ids
    assert token_ids.count(oracle.token_to_id("<|im_start|>")) == 3
    assert await texts.decode(np.array(token_ids, dtype=np.int32), model, skip_special_tokens=False) == expected


READS_A_VOCABULARY = """
import pathlib, sys
from paceline_scheduler.api.text.tokenizer import read_text_model
from paceline_scheduler.backend import GenerationDefaults, TokenizerSource

def resident_mib():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

json = pathlib.Path(sys.argv[1]).read_bytes()
source = TokenizerSource("digest", json, "", 1, 2, (2,), (), (), (), GenerationDefaults())
before = resident_mib()
model = read_text_model(source, 49152)
print(resident_mib() - before)
"""


def test_what_reading_a_vocabulary_takes_is_given_back(tmp_path):
    """Of the default model's 21 MiB stay, with what its tokens spell; it would be 37."""
    path = tmp_path / "tokenizer.json"
    path.write_bytes(load_tokenizer(default_model_path(os.environ)).tokenizer_json)
    command = [sys.executable, "-c", READS_A_VOCABULARY, str(path)]
    grown = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert grown < 28


async def test_long_texts_are_tokenised_on_a_thread_and_short_ones_here(texts, monkeypatch):
    model = served_model(max_model_len=4096)
    threads = []
    text_model = await texts.model(model)
    encode = text_model._encode
    monkeypatch.setattr(
        type(text_model), "_encode", lambda self, text: threads.append(threading.current_thread().name) or encode(text)
    )
    short, long = "hello " * 100, "hello " * 1000
    assert (await texts.token_ids(GenerateRequest(text=short), model)).tolist() == BYTE_LEVEL.encode(short).ids
    assert (await texts.token_ids(GenerateRequest(text=long), model)).tolist() == BYTE_LEVEL.encode(long).ids
    assert threads[0] == threading.current_thread().name
    assert threads[1].startswith("tokenizer")


async def test_tokens_are_taken_as_they_are_inside_the_vocabulary(texts):
    model = served_model(vocab_size=400)
    assert (await texts.token_ids(GenerateRequest(token_ids={"ids": [0, 399]}), model)).tolist() == [0, 399]
    for bad in (-1, 400, 2**31 - 1):
        with pytest.raises(InvalidRequestError, match=f"is {bad}") as caught:
            await texts.token_ids(GenerateRequest(token_ids={"ids": [0, bad, bad]}), model)
        assert caught.value.field == "token_ids.ids[1]"


@pytest.mark.parametrize("text", ["日" * 100, "\x00" * 300, "a" * 300])
async def test_a_prompt_that_is_too_long_in_tokens_names_both_numbers(texts, text):
    """Which only tokenising can tell."""
    num_tokens = len(BYTE_LEVEL.encode(text).ids)
    with pytest.raises(InvalidRequestError, match=f"has {num_tokens} tokens; at most 63 fit") as caught:
        await texts.token_ids(GenerateRequest(text=text), served_model(max_model_len=64))
    assert caught.value.field == "prompt"


def has_one_of(ways, token_ids):
    """Whether these tokens somewhere go on as one of the ways does."""
    starts = range(len(token_ids))
    return any(tuple(token_ids[start : start + len(way)]) == way for way in ways for start in starts)


@pytest.mark.parametrize("text", ["hello", "so hello", "so\nhello", "“hello”", "so,hello", "so\n hello"])
@pytest.mark.parametrize("word", ["hello", " hello"])
async def test_a_bad_word_is_found_wherever_a_text_has_it(texts, word, text):
    for tokenizer, model in ((BYTE_LEVEL, served_model()), (SENTENCE_PIECE, sentence_piece_model())):
        ways = await texts.bad_word_token_ids((word,), model)
        assert has_one_of(ways, tokenizer.encode(text, add_special_tokens=False).ids)
        assert not has_one_of(ways, tokenizer.encode(text.replace("hello", "held"), add_special_tokens=False).ids)


async def test_each_way_to_spell_a_bad_word_is_named_once(texts):
    marked = await texts.bad_word_token_ids(("hello", " hello"), sentence_piece_model())
    pieces = [[SENTENCE_PIECE.id_to_token(token_id) for token_id in way] for way in marked]
    assert pieces == [["▁hello"], ["▁", "▁hello"], ["h", "el", "lo"]]
    plain = await texts.bad_word_token_ids(("hello", " hello"), served_model())
    assert plain == tuple(tuple(BYTE_LEVEL.encode(way).ids) for way in ("hello", " hello"))


async def test_a_bad_word_that_joins_the_line_end_before_it_is_left_as_it_is_alone(texts):
    """What is left of a token that both share would be another word."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens(["\n\n"])
    model = served_model(tokenizer_source(tokenizer), vocab_size=tokenizer.get_vocab_size())
    ways = await texts.bad_word_token_ids(("\n!",), model)
    assert ways == tuple(tuple(tokenizer.encode(way).ids) for way in ("\n!", " \n!"))


async def test_many_tokens_decode_to_the_same_text_as_few(texts):
    token_ids = np.array(BYTE_LEVEL.encode("hello ☃ ").ids * 2000, dtype=np.int32)
    assert await texts.decode(token_ids, served_model(), skip_special_tokens=True) == "hello ☃ " * 2000


async def test_a_tokenizer_is_built_once_for_all_who_ask_at_the_same_time(texts):
    model = served_model()
    first, *others = await asyncio.gather(*(texts.model(model) for _ in range(5)))
    assert all(other is first for other in others)


async def test_a_prepared_tokenizer_is_the_one_that_is_used(texts):
    model = served_model()
    await texts.prepare(model.tokenizer, model.vocab_size)
    assert len(texts._models._loading) == 1
    await texts.token_ids(GenerateRequest(text="hello"), model)
    assert len(texts._models._loading) == 1


async def test_a_caller_that_goes_away_does_not_end_the_loading_for_others(texts):
    """It is nobody's in particular."""
    model = served_model()
    leaving = asyncio.create_task(texts.model(model))
    staying = asyncio.create_task(texts.model(model))
    await asyncio.sleep(0)
    leaving.cancel()
    assert (await staying).spelling.decode([300], skip_special_tokens=True)


async def test_a_tokenizer_that_cannot_be_streamed_is_tried_once(texts):
    tokenizer = byte_level_tokenizer()
    tokenizer.decoder = decoders.WordPiece()
    model = served_model(tokenizer_source(tokenizer))
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="WordPiece"):
            await texts.token_ids(GenerateRequest(text="x"), model)


PANIC = BYTE_LEVEL.to_str().replace('"continuing_subword_prefix":null', '"continuing_subword_prefix":"xxxxx"').encode()


@pytest.mark.parametrize("json", [b"{}", b"\xff", b"[]", b'{"version": "1.0"}', PANIC])
async def test_bytes_that_are_no_tokenizer_are_refused_by_name(texts, json):
    with pytest.raises(UnsupportedError, match="tokenizers library cannot read it"):
        await texts.prepare(
            TokenizerSource("digest", json, None, None, None, (), (), (), (), GenerationDefaults()), 100
        )


async def test_a_token_far_beyond_any_vocabulary_is_refused(texts):
    """One number would make a list of gigabytes."""
    json = BYTE_LEVEL.to_str().replace('"a":', '"a":4000000000,"a before":')
    source = TokenizerSource("far", json.encode(), None, None, None, (), (), (), (), GenerationDefaults())
    with pytest.raises(UnsupportedError, match="a token of id 4000000000"):
        await texts.prepare(source, 400)


async def test_a_text_at_which_the_tokenizer_fails_is_refused(texts):
    json = SENTENCE_PIECE.to_str().replace('"unk_token":"<unk>"', '"unk_token":"<none>"').replace("<0x", "<1x")
    source = tokenizer_source(Tokenizer.from_str(json))
    model = served_model(source, vocab_size=SENTENCE_PIECE.get_vocab_size())
    with pytest.raises(InvalidRequestError, match="the model's tokenizer fails at it"):
        await texts.token_ids(GenerateRequest(text="ß"), model)
    with pytest.raises(InvalidRequestError, match="the model's tokenizer fails at it"):
        await texts.bad_word_token_ids(("ß",), model)


async def test_the_least_used_tokenizer_is_forgotten(texts):
    """So that models that come and go leave no memory behind."""
    models = [served_model(vocab_size=400 + number) for number in range(9)]
    built = [await texts.model(model) for model in models]
    assert await texts.model(models[8]) is built[8]
    assert await texts.model(models[0]) is not built[0]


async def test_work_is_refused_when_too_much_waits():
    threads = TextThreads(EdgeLimits(max_num_waiting_texts=1, num_tokenizer_threads=1))
    release = threading.Event()
    waiting = asyncio.create_task(threads.run(release.wait))
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError):
        await threads.run(release.wait)
    release.set()
    assert await waiting
    assert await threads.run(lambda: 1) == 1
    threads.close()

"""Tokenizers of a scheduler whose predecessor had them: text at once, the vocabulary when it is needed."""

import asyncio
import threading
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rig.tokenizers import (
    byte_level_tokenizer,
    content_of,
    sentence_piece_tokenizer,
    tokenizer_source,
    try_here,
)
from paceline.forms.library import LIBRARY
from paceline.plan.hashes import TOKENIZER_FORM, tokenizer_digest, tokenizer_form
from paceline.plan.sampling import GenerationDefaults
from paceline.plan.values import Model
from paceline_scheduler.api.limits import EdgeLimits
from paceline_scheduler.api.text import tokenizer
from paceline_scheduler.api.text.detokenizer import Spelling
from paceline_scheduler.api.text.spelling_file import TokenTexts, pack, unpack
from paceline_scheduler.api.text.tokenizer import TextThreads
from paceline_scheduler.disk_cache import AsyncDiskCache, DiskCache
from paceline_scheduler.errors import DivergenceError, LinkError, UnsupportedError
from paceline_scheduler.link.linked_executor import LinkedExecutor, served_models
from paceline_scheduler.link.tokenizers import TokenizerStore

TextModels = partial(tokenizer.TextModels, trial=try_here)
BYTE_LEVEL = tokenizer_source(byte_level_tokenizer(), eos_token="<|im_end|>")
SENTENCE_PIECE = tokenizer_source(sentence_piece_tokenizer(), bos_token="<s>", eos_token="</s>", add_bos=True)


class ServingConnection:
    """A connection to an executor that has one tokenizer, and counts how often it was asked for it."""

    def __init__(self, source):
        self.source = source
        self.num_calls = 0
        self.answers = asyncio.Event()
        self.answers.set()

    async def get_tokenizer(self, timeout_s):
        """Send it."""
        del timeout_s
        self.num_calls += 1
        await self.answers.wait()
        return content_of(self.source)


def cache_in(folder):
    """A cache that is waited for as long as it takes."""
    return AsyncDiskCache(DiskCache(folder), max_wait_s=30)


@pytest.fixture
def threads():
    """Threads to read vocabularies on."""
    threads = TextThreads(EdgeLimits())
    yield threads
    threads.close()


@given(st.lists(st.tuples(st.binary(max_size=4), st.booleans()), max_size=20), st.integers(0, 3), st.text(max_size=3))
def test_a_file_gives_back_what_tokens_spell(tokens, num_stripped_spaces, bos_token):
    all_bytes = tuple(spelt for spelt, _ in tokens)
    without_special = tuple(b"" if is_special else spelt for spelt, is_special in tokens)
    texts = TokenTexts(Spelling(all_bytes, without_special, num_stripped_spaces), (("bos_token", bos_token),))
    assert unpack(pack(texts)) == texts


@pytest.mark.parametrize("source", [BYTE_LEVEL, SENTENCE_PIECE], ids=["byte level", "sentence piece"])
async def test_a_successor_spells_before_it_has_read_the_vocabulary(source, tmp_path, threads):
    cache = cache_in(tmp_path)
    first, later = [await TextModels(threads, cache).get(source, 500) for _ in range(2)]
    assert (first.is_complete, later.is_complete) == (True, False)
    assert (later.spelling, later.special_tokens) == (first.spelling, first.special_tokens)
    assert later.encode_text("hello hello").tolist() == first.encode_text("hello hello").tolist()
    assert later.is_complete


async def test_a_vocabulary_that_no_prompt_needed_is_read_when_nobody_is_served(tmp_path, threads, monkeypatch):
    monkeypatch.setattr(tokenizer, "_LOOK_FOR_REST_S", 0.001)
    looks = []

    def is_at_rest():
        looks.append(model.is_complete)
        return len(looks) > 3

    cache = cache_in(tmp_path)
    await TextModels(threads, cache).get(BYTE_LEVEL, 500)
    model = await TextModels(threads, cache, is_at_rest).get(BYTE_LEVEL, 500)
    while not model.is_complete:
        await asyncio.sleep(0.001)
    assert looks[:4] == [False] * 4


async def test_the_first_new_prompt_of_a_successor_waits_for_streams_that_come_back(tmp_path, threads, monkeypatch):
    """Reading the vocabulary for it would keep their tokens waiting. Once it has been read nobody waits."""
    cache = cache_in(tmp_path)
    await TextModels(threads, cache).get_for_prompt(BYTE_LEVEL, 500)  # the first scheduler has read it
    models = TextModels(threads, cache, lambda: False)
    monkeypatch.setattr(tokenizer, "_COMEBACKS_S", 1e6)
    prompt = asyncio.create_task(models.get_for_prompt(BYTE_LEVEL, 500))
    model = await models.get(BYTE_LEVEL, 500)
    await asyncio.sleep(0.01)
    assert not prompt.done()
    prompt.cancel()
    monkeypatch.setattr(tokenizer, "_COMEBACKS_S", 0.0)
    assert await models.get_for_prompt(BYTE_LEVEL, 500) is model
    model.complete()
    monkeypatch.setattr(tokenizer, "_COMEBACKS_S", 1e6)
    assert await models.get_for_prompt(BYTE_LEVEL, 500) is model


async def test_the_first_new_prompt_waits_for_nobody_where_nobody_can_come_back(tmp_path, threads, monkeypatch):
    """As after the start of a whole system: the executors run nothing."""
    monkeypatch.setattr(tokenizer, "_COMEBACKS_S", 1e6)
    monkeypatch.setattr(tokenizer, "_LOOK_FOR_REST_S", 1e6)
    cache = cache_in(tmp_path)
    await TextModels(threads, cache).get(BYTE_LEVEL, 500)
    model = await asyncio.wait_for(TextModels(threads, cache, lambda: True).get_for_prompt(BYTE_LEVEL, 500), 5)
    assert not model.is_complete  # it is for whoever encodes


async def test_a_vocabulary_of_another_size_has_a_file_of_its_own(tmp_path, threads):
    """Its table is as long as the model's vocabulary."""
    cache = cache_in(tmp_path)
    for vocab_size in (500, 600):
        model = await TextModels(threads, cache).get(BYTE_LEVEL, vocab_size)
        assert len(model.spelling.token_bytes) == vocab_size


async def test_a_file_of_another_form_is_written_anew(tmp_path, threads):
    cache = cache_in(tmp_path)
    cache.store(f"spelling 2 {BYTE_LEVEL.digest} 500", lambda: b"{}\n")
    assert [(await TextModels(threads, cache).get(BYTE_LEVEL, 500)).is_complete for _ in range(2)] == [True, False]


async def test_a_tokenizer_that_could_not_be_read_for_want_of_a_thread_is_read_the_next_time(threads):
    """One that cannot be used is refused as before, and read once."""
    errors = [RuntimeError("can't start new thread"), UnsupportedError("tokenizer.decoder", "is unknown")]
    left = list(errors)

    async def fail(*_):
        raise left.pop(0)

    models = tokenizer.TextModels(threads, AsyncDiskCache(), trial=fail)
    for expected in (*errors, errors[-1]):
        with pytest.raises(type(expected)):
            await models.get(BYTE_LEVEL, 500)


@pytest.mark.parametrize("source", [BYTE_LEVEL, SENTENCE_PIECE], ids=["byte level", "sentence piece"])
async def test_a_successor_does_not_fetch_the_tokenizer_again(source, tmp_path):
    connection = ServingConnection(source)
    cache = cache_in(tmp_path)
    for _ in range(2):
        store = TokenizerStore(cache=cache)
        assert await store.get(source.digest, 500, connection) == source
    assert connection.num_calls == 1
    assert isinstance(source.defaults, GenerationDefaults)


async def test_a_tokenizer_that_is_not_the_announced_one_is_not_kept(tmp_path):
    """Nor one that cannot be used."""
    connection, cache = ServingConnection(BYTE_LEVEL), cache_in(tmp_path)
    with pytest.raises(DivergenceError):
        await TokenizerStore(cache=cache).get(SENTENCE_PIECE.digest, 500, connection)

    async def refuse(source, vocab_size):
        raise UnsupportedError("tokenizer.decoder", f"{source.digest} {vocab_size}")

    with pytest.raises(LinkError):
        await TokenizerStore(refuse, cache).get(BYTE_LEVEL.digest, 500, connection)
    assert await cache.load("what is to be stored is stored then") is None
    assert list(tmp_path.iterdir()) == []


async def test_what_lies_on_disk_is_taken_only_where_it_is_what_was_announced(tmp_path):
    """Another process may have written it."""
    connection, cache = ServingConnection(BYTE_LEVEL), cache_in(tmp_path)
    cache.store(f"tokenizer 2 {BYTE_LEVEL.digest}", lambda: content_of(SENTENCE_PIECE))
    assert await TokenizerStore(cache=cache).get(BYTE_LEVEL.digest, 500, connection) == BYTE_LEVEL
    assert connection.num_calls == 1


async def test_an_earlier_release_names_a_digest_that_says_nothing(tmp_path):
    """Two of its executors may name the same one and have two tokenizers."""
    cache = cache_in(tmp_path)
    store = TokenizerStore(cache=cache)
    found = [await store.get("ab" * 16, 500, ServingConnection(source)) for source in (BYTE_LEVEL, SENTENCE_PIECE)]
    assert [source.json for source in found] == [BYTE_LEVEL.json, SENTENCE_PIECE.json]
    assert [tokenizer_form(source.digest) for source in found] == [1, 1]
    assert await cache.load("what is to be stored is stored then") is None
    assert list(tmp_path.iterdir()) == []


def test_one_vocabulary_may_be_read_in_two_ways_by_two_releases():
    """Within a release it is read in one."""
    other = replace(BYTE_LEVEL, end_token_ids=(5,))
    earlier, same = (replace(other, digest=tokenizer_digest(content_of(other), form)) for form in (1, TOKENIZER_FORM))
    assert BYTE_LEVEL.is_alike(earlier)
    assert not BYTE_LEVEL.is_alike(same)
    assert not BYTE_LEVEL.is_alike(SENTENCE_PIECE)
    assert not BYTE_LEVEL.is_alike(replace(SENTENCE_PIECE, digest=earlier.digest))


def test_of_two_releases_the_newer_one_says_how_a_model_is_read():
    """Whichever has attached first."""
    model = Model("tiny", "llama", 256, 400)
    earlier = replace(BYTE_LEVEL, end_token_ids=(5,), digest=tokenizer_digest(content_of(BYTE_LEVEL), 1))
    for tokenizers in ([BYTE_LEVEL, earlier], [earlier, BYTE_LEVEL]):
        executors = [LinkedExecutor(0.0, model=model, tokenizer=each) for each in tokenizers]
        (served,) = served_models(executors)
        assert (served.tokenizer, served.num_executors) == (BYTE_LEVEL, 2)


def test_a_form_that_is_not_known_here_decides_nothing_for_the_others():
    """Any executor may claim one, with another template and other end tokens."""
    model = Model("tiny", "llama", 256, 400)
    claimed = replace(BYTE_LEVEL, end_token_ids=(5,), digest=tokenizer_digest(content_of(BYTE_LEVEL), 999))
    for known in (BYTE_LEVEL, replace(BYTE_LEVEL, digest=tokenizer_digest(content_of(BYTE_LEVEL), 1))):
        for tokenizers in ([known, claimed], [claimed, known]):
            (served,) = served_models([LinkedExecutor(0.0, model=model, tokenizer=each) for each in tokenizers])
            assert served.tokenizer == known


def test_a_model_is_said_to_take_forms_where_one_executor_holds_outputs_to_them_with_the_library_here():
    def told(*libraries):
        models = [Model("tiny", "llama", 256, 400, structured_output=library) for library in libraries]
        (served,) = served_models([LinkedExecutor(0.0, model=each, tokenizer=BYTE_LEVEL) for each in models])
        return served.structured_output

    assert told("", LIBRARY, "") == told(LIBRARY, "llguidance 1.0.0") == told("llguidance 1.0.0", LIBRARY) == LIBRARY
    assert (told("", ""), told("llguidance 1.0.0", "")) == ("", "llguidance 1.0.0")


async def test_an_executor_that_is_slow_with_its_tokenizer_keeps_no_other_model_waiting():
    store = TokenizerStore()
    slow, other = ServingConnection(BYTE_LEVEL), ServingConnection(SENTENCE_PIECE)
    slow.answers.clear()
    waiting = [asyncio.create_task(store.get(BYTE_LEVEL.digest, 500, slow)) for _ in range(2)]
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        assert await store.get(SENTENCE_PIECE.digest, 500, other) == other.source
    assert not any(task.done() for task in waiting)
    slow.answers.set()
    assert await asyncio.gather(*waiting) == [slow.source, slow.source]
    assert slow.num_calls == 1


async def test_a_disk_that_hangs_keeps_no_executor_from_attaching(tmp_path, threads, monkeypatch):
    """Neither when it is read nor when it is written."""
    answers = threading.Event()
    for name in ("load", "store"):
        monkeypatch.setattr(DiskCache, name, lambda *_: answers.wait(30) and None)
    cache = AsyncDiskCache(DiskCache(tmp_path), max_wait_s=0.01)
    models = TextModels(threads, cache)
    store = TokenizerStore(models.get, cache)
    try:
        async with asyncio.timeout(30):
            assert await store.get(BYTE_LEVEL.digest, 500, ServingConnection(BYTE_LEVEL)) == BYTE_LEVEL
    finally:
        answers.set()

"""Tokenizers that somebody else made: what they break is a process of their own, and what they say is checked."""

import asyncio
import json
import re
from dataclasses import replace

import pytest
from tokenizers import Regex, pre_tokenizers

from edge_rig.edge_server import NOON
from edge_rig.tokenizers import (
    CHAT_TEMPLATE,
    byte_level_tokenizer,
    sentence_piece_tokenizer,
    served_model,
    tokenizer_source,
    try_here,
)
from paceline.plan.plain_tokenizer import is_plain
from paceline.v1.inference_pb2 import GenerateRequest
from paceline_executor.weights.gguf.pretokenizers import PRE_TOKENIZERS
from paceline_scheduler.api.limits import EdgeLimits
from paceline_scheduler.api.text import tokenizer
from paceline_scheduler.api.text.confined import Confinement
from paceline_scheduler.api.text.texts import Texts
from paceline_scheduler.disk_cache import AsyncDiskCache, DiskCache
from paceline_scheduler.errors import InvalidRequestError, UnsupportedError

CHAT = {"messages": [{"role": "user", "content": "Hello<|im_end|> there, 12 naïve snowmen ☃"}]}


def changed(change, base=byte_level_tokenizer):
    """A tokenizer.json that is changed by a function of its fields."""
    fields = json.loads(base().to_str())
    change(fields)
    return json.dumps(fields).encode()


def with_parts(place, *parts):
    """With these parts at a place, as the library writes them."""
    inner = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "post_processor": "processors"}[place]
    return changed(lambda fields: fields.update({place: {"type": "Sequence", inner: list(parts)}}))


def replaces(pattern, content):
    """A part that puts a text in the place of another."""
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def splits(pattern):
    """A part that cuts text by an expression."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def unusual():
    """A sound tokenizer that cuts text by an expression which no list has."""
    made = byte_level_tokenizer()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"[a-m]+|\s"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return made


@pytest.fixture
def source():
    """Makes what an executor would send of a JSON."""
    base = tokenizer_source(byte_level_tokenizer(), chat_template=CHAT_TEMPLATE)
    return lambda data: replace(base, json=data, digest=f"2:{hash(data)}")


@pytest.fixture
async def texts(monkeypatch):
    """Prompts by tokenizers that have a second for each piece of work, and 768 MiB."""
    monkeypatch.setattr(tokenizer, "_CONFINEMENT", Confinement(1.0, 30.0, 768 << 20))
    texts = Texts(EdgeLimits(), lambda: NOON)
    yield texts
    await texts.close()


@pytest.mark.parametrize(
    "made",
    [
        byte_level_tokenizer().to_str(),
        sentence_piece_tokenizer().to_str(),
        *(
            changed(lambda fields, cut=cut: fields.update(pre_tokenizer=json.loads(cut.build().__getstate__())))
            for cut in PRE_TOKENIZERS.values()
        ),
    ],
)
def test_tokenizers_that_models_have_encode_where_requests_are(made):
    assert is_plain(made if isinstance(made, bytes) else made.encode())


@pytest.mark.parametrize(
    "made",
    [
        with_parts("normalizer", replaces("a", "b" * 65)),
        with_parts("normalizer", replaces("a", "aaaa"), replaces("a", "aaaa"), replaces("aa", "a" * 20)),
        with_parts("normalizer", replaces("", "a")),
        with_parts("normalizer", {"type": "Replace", "pattern": {"Regex": "a+"}, "content": ""}),
        with_parts("normalizer", {"type": "Prepend", "prepend": "a" * 17}),
        with_parts("normalizer", {"type": "Precompiled", "precompiled_charsmap": ""}),
        with_parts("normalizer", *[{"type": "NFC"}] * 17),
        with_parts("pre_tokenizer", splits("(a+)+$")),
        with_parts("pre_tokenizer", {"type": "UnicodeScripts"}),
        changed(lambda fields: fields["model"].update(dropout=0.1)),
        changed(lambda fields: fields["model"].update(type="Unigram")),
        changed(lambda fields: fields["model"]["vocab"].update(far=1 << 31)),
        changed(lambda fields: fields["added_tokens"][0].update(id=(1 << 32) - 1)),
        changed(lambda fields: fields.pop("model")),
        changed(lambda fields: fields.update(normalizer=["NFC"])),
        b" " * (65 << 20),
        b"[" * 100_000,
    ],
    ids=lambda made: made[-40:].decode(),
)
def test_any_other_encodes_elsewhere(made):
    assert not is_plain(made)


async def test_where_a_tokenizer_encodes_changes_no_token(source, texts):
    """Text, a chat with a special token's name in it, and words."""
    odd = served_model(source(unusual().to_str().encode()), max_model_len=4096)
    here = Texts(EdgeLimits(), lambda: NOON, trial=try_here)
    answers = []
    for each in (texts, here):
        prompts = [
            await each.token_ids(GenerateRequest(**prompt), odd) for prompt in ({"text": "Hi\n12 ☃"}, {"chat": CHAT})
        ]
        words = await each.bad_word_token_ids(("hello", "snow"), odd)
        model = await each.model(odd)
        answers.append(([ids.tolist() for ids in prompts], words, model.spelling, model.confined is not None))
    await here.close()
    assert answers[0][:3] == answers[1][:3]
    assert [is_confined for *_, is_confined in answers] == [True, False]


@pytest.mark.parametrize(
    ("made", "refusal"),
    [
        (changed(lambda fields: fields["model"]["vocab"].update(far=(1 << 32) - 1)), "the highest that is taken is"),
        (b'{"model": {}}', "cannot read it"),
        (b"\xff", "cannot read it"),
        # Of every l a thousand, of each of these a thousand, and so on
        (with_parts("normalizer", *[replaces("l", "l" * 1000)] * 4), "takes too long, or needs too much memory"),
        (
            with_parts("pre_tokenizer", splits(r"^(.|.|l)*(.|.|l)*(.|.|l)*(.|.|l)*(.|.|l)*$\A")),
            "retry-limit-in-match|takes too long",
        ),
    ],
    ids=["id", "no model", "no text", "memory", "expression"],
)
async def test_one_that_cannot_be_tried_is_refused_and_others_are_served(source, texts, made, refusal):
    bad, good = (served_model(source(each)) for each in (made, byte_level_tokenizer().to_str().encode()))
    refused, prompt = await asyncio.gather(
        texts.token_ids(GenerateRequest(text="Hello"), bad),
        texts.token_ids(GenerateRequest(text="Hello"), good),
        return_exceptions=True,
    )
    assert isinstance(refused, UnsupportedError)
    assert re.search(refusal, str(refused))
    assert byte_level_tokenizer().decode(prompt.tolist()) == "Hello"


async def test_a_prompt_that_takes_its_tokenizer_too_long_ends_alone(source, texts):
    """A megabyte of every z: the sample that each is tried with has none."""
    model = served_model(source(with_parts("normalizer", replaces("z", "l" * (1 << 20)))), max_model_len=100_000)
    with pytest.raises(InvalidRequestError, match="tokenizer fails at it: it takes too long, or needs too much memory"):
        await texts.token_ids(GenerateRequest(text="z" * 60_000), model)
    prompt = await texts.token_ids(GenerateRequest(text="Hello"), model)
    assert byte_level_tokenizer().decode(prompt.tolist()) == "Hello"


async def test_a_successor_does_not_try_a_tokenizer_again(source, tmp_path):
    """Nor forgets that it must not encode here."""
    num_trials = 0

    async def trial(source, vocab_size):
        nonlocal num_trials
        num_trials += 1
        return await tokenizer.try_confined(source, vocab_size)

    odd, threads = source(unusual().to_str().encode()), tokenizer.TextThreads(EdgeLimits())
    cache = AsyncDiskCache(DiskCache(tmp_path), max_wait_s=30)
    for _ in range(2):
        models = tokenizer.TextModels(threads, cache, trial=trial)
        model = await models.get(odd, 400)
        assert model.confined is not None
        await models.close()
    threads.close()
    assert num_trials == 1

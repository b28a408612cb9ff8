"""Requests through all processes: client library, scheduler, executor, the real model and back."""

import asyncio
from collections import defaultdict

import pytest

from paceline_client import (
    AsyncClient,
    Client,
    FinishReason,
    InvalidRequestError,
    Output,
    Sampling,
    Stopping,
)

TEXTS = (
    "The capital of France is",
    "Water boils at",
    "def fibonacci(n):\n",
    "Once upon a time there was a " + "very " * 60 + "old king who",
)
GREEDY = Sampling(temperature=0.0)
SEEDED = Sampling(temperature=0.9, top_p=0.95, seed=7)
NUM_COPIES = 8


def mixed_requests():
    """Eight kinds of request: short and long prompts, short and long outputs, greedy and seeded."""
    return [
        {"prompt": text, "sampling": sampling, "stopping": Stopping(max_tokens=3 + 5 * number, ignore_eos=True)}
        for number, text in enumerate(TEXTS)
        for sampling in (GREEDY, SEEDED)
    ]


async def test_64_requests_at_once_get_the_tokens_each_gets_alone(running_system):
    requests = mixed_requests()
    async with AsyncClient(running_system.api) as client:
        alone = [(await client.generate(**request)).token_ids for request in requests]
        together = await asyncio.gather(*(client.generate(**request) for request in requests * NUM_COPIES))
    copies = defaultdict(set)
    for number, result in enumerate(together):
        copies[number % len(requests)].add(result.token_ids)
    assert [copies[number] for number in range(len(requests))] == [{tokens} for tokens in alone]
    assert all(len(tokens) == request["stopping"].max_tokens for tokens, request in zip(alone, requests, strict=True))


def test_the_demos_own_question_is_answered_rightly_with_nothing_set(running_system):
    """Eight of eight times: without the model's default system message it was none."""
    question = {"role": "user", "content": "What is the capital of France?"}
    with Client(running_system.api) as client:
        assert client.list_models()[0].default_system_text
        for seed in range(8):
            result = client.generate(messages=[question], sampling=Sampling(seed=seed))
            assert "Paris" in result.text
            assert result.finish_reason is FinishReason.STOP


def test_a_newcomers_first_question_is_answered(running_system):
    """With nothing set: the values of the model's card hold, and the question is the README's. Eight of eight times."""
    question = {"role": "user", "content": "Why is the sky blue?"}
    with Client(running_system.api) as client:
        answers = [
            client.generate(messages=[question], stopping=Stopping(max_tokens=48), request_id=f"newcomer-{number}").text
            for number in range(8)
        ]
    assert [answer for answer in answers if "light" not in answer and "atmospher" not in answer] == []


def test_the_model_is_described_as_it_is(running_system):
    with Client(running_system.api) as client:
        (model,) = client.list_models()
    assert (model.name, model.architecture, model.quantization) == ("smollm2-135m-instruct", "llama", "Q4_1")
    assert (model.max_model_len, model.vocab_size, model.num_executors) == (8192, 49152, 1)


def test_a_stop_text_ends_the_output_before_it(running_system):
    with Client(running_system.api) as client:
        whole = client.generate("Count: one, two, three,", sampling=GREEDY, stopping=Stopping(max_tokens=24))
        word = whole.text.split()[3]
        cut = client.generate("Count: one, two, three,", sampling=GREEDY, stopping=Stopping(max_tokens=24, stop=[word]))
    assert cut.text == whole.text[: whole.text.index(word)]
    assert cut.matched_stop == word
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]


def test_log_probabilities_come_with_the_tokens_that_were_drawn(running_system):
    with Client(running_system.api) as client:
        result = client.generate(TEXTS[0], sampling=GREEDY, stopping=Stopping(max_tokens=5), output=Output(logprobs=3))
    assert [entry.token_id for entry in result.logprobs] == list(result.token_ids)
    assert all(entry.top[0].token_id == entry.token_id and len(entry.top) == 3 for entry in result.logprobs)


def test_a_second_request_with_the_same_prompt_starts_from_the_prefix_cache(running_system):
    prompt = "A prompt that nobody sent before. " * 12
    with Client(running_system.api) as client:
        results = [client.generate(prompt, sampling=GREEDY, stopping=Stopping(max_tokens=4)) for _ in range(2)]
    first, second = results
    assert first.usage.num_cached_tokens == 0
    assert second.usage.num_cached_tokens >= second.usage.num_prompt_tokens - 16
    assert first.token_ids == second.token_ids


@pytest.mark.parametrize(
    ("bad", "error", "field"),
    [
        ({"sampling": Sampling(top_p=1.5)}, InvalidRequestError, "sampling.top_p"),
        ({"stopping": Stopping(max_tokens=0)}, InvalidRequestError, "stopping.max_tokens"),
        ({"stopping": Stopping(max_tokens=1_000_000)}, InvalidRequestError, "stopping.max_tokens"),
        ({"prompt": "word " * 9000}, InvalidRequestError, "prompt"),
        ({"prompt": None, "token_ids": [49152]}, InvalidRequestError, "token_ids"),
        ({"sampling": Sampling(repetition_penalty=10.5)}, InvalidRequestError, "sampling.repetition_penalty"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_request_is_refused_naming_the_field_and_the_next_one_works(running_system, bad, error, field):
    with Client(running_system.api) as client:
        with pytest.raises(error, match=field):
            client.generate(**{"prompt": "Hello", **bad})
        assert client.generate("Hello", stopping=Stopping(max_tokens=2)).token_ids


async def test_leaving_a_stream_early_frees_its_blocks(running_system):
    async with AsyncClient(running_system.api) as client:
        stream = client.stream("Tell a very long story.", stopping=Stopping(max_tokens=2000, ignore_eos=True))
        async for delta in stream:
            if delta.offset >= 2:
                break
        await stream.aclose()
        async with asyncio.timeout(30):
            while await running_system.num_running_requests():
                await asyncio.sleep(0.05)

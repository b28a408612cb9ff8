"""Chats as OpenAI's API tells them: every byte is read by OpenAI's own types, strictly, and by its client."""

import json

import grpc
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from gateway_rig import ASKING, CHAT, events_of, serve_gateway
from paceline_client import Delta, FinishReason, TokenLogprob, TokenLogprobs
from paceline_client.testing import Break, End, Fail, FakeServer, Tokens, say
from paceline_gateway.chat import ChatAnswer

SEVERAL = [
    Tokens((1,), "a"),
    Tokens((2,), "x", completion=1),
    Tokens((3,)),
    Tokens((4,), "b\u2028ü"),
    End(FinishReason.LENGTH, completion=1, num_prompt_tokens=7),
    End(num_prompt_tokens=7, num_cached_tokens=4),
]
OVERLOADED = Fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", "QUEUE_FULL", retry_after_seconds=0.25)


def sdk_of(gateway, max_retries=0):
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="k", max_retries=max_retries)


async def chunks(gateway, **more):
    """All chunks of a stream, which has to end as it should."""
    response = await gateway.post(CHAT, {**ASKING, "stream": True} | more)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["x-accel-buffering"] == "no"
    *data, last = events_of(response.text)
    assert last == "[DONE]"
    return [json.loads(each) for each in data], [
        ChatCompletionChunk.model_validate_json(each, strict=True) for each in data
    ]


async def test_a_stream_tells_the_role_with_the_first_token_and_ends_each_choice_once():
    async with FakeServer(SEVERAL) as server, serve_gateway(server.target) as gateway:
        raw, typed = await chunks(gateway, n=2)
        assert len({(chunk.id, chunk.created, chunk.model) for chunk in typed}) == 1
        assert (typed[0].id[:9], typed[0].model) == ("chatcmpl-", "fake")
        told = [(c["index"], c["delta"], c["finish_reason"]) for chunk in raw for c in chunk["choices"]]
        assert told == [
            (0, {"role": "assistant", "content": "a"}, None),
            (1, {"role": "assistant", "content": "x"}, None),
            (0, {"content": "b\u2028ü"}, None),
            (1, {}, "length"),
            (0, {}, "stop"),
        ]
        assert all(chunk["choices"][0]["logprobs"] is None and "usage" not in chunk for chunk in raw)


async def test_a_character_that_ends_lines_for_some_readers_is_escaped():
    async with FakeServer(SEVERAL) as server, serve_gateway(server.target) as gateway:
        response = await gateway.post(CHAT, {**ASKING, "stream": True, "n": 2})
        assert "\u2028" not in response.text
        assert r"b\u2028ü" in response.text


async def test_usage_comes_last_with_no_choices_and_is_null_before():
    async with FakeServer(SEVERAL) as server, serve_gateway(server.target) as gateway:
        raw, typed = await chunks(gateway, n=2, stream_options={"include_usage": True})
        assert [chunk["usage"] for chunk in raw[:-1]] == [None] * 5
        assert raw[-1]["choices"] == []
        usage = typed[-1].usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (7, 4, 11)
        assert usage.prompt_tokens_details.cached_tokens == 4


async def test_a_whole_answer_says_the_same():
    async with FakeServer(SEVERAL) as server, serve_gateway(server.target) as gateway:
        response = await gateway.post(CHAT, {**ASKING, "n": 2, "model": "fake"}, {"x-request-id": "mine"})
        assert response.headers["x-request-id"] == "mine"
        answer = ChatCompletion.model_validate_json(response.content, strict=True)
        assert [(c.index, c.message.content, c.finish_reason) for c in answer.choices] == [
            (0, "ab\u2028ü", "stop"),
            (1, "x", "length"),
        ]
        assert answer.usage.total_tokens == 11


async def test_unknown_fields_are_named_and_ignored():
    async with FakeServer(say("hi")) as server, serve_gateway(server.target) as gateway:
        response = await gateway.post(CHAT, {**ASKING, "temprature": 1, "a,b\nö": 2})
        assert response.headers["x-paceline-ignored"] == "temprature,a?b??"


class Capital(BaseModel):
    name: str


async def test_the_sdk_reads_streams_answers_and_parsed_objects():
    async with (
        FakeServer(say('{"name": "Paris"}')) as server,
        serve_gateway(server.target) as gateway,
        sdk_of(gateway) as sdk,
    ):
        ask = {"model": "fake", "messages": ASKING["messages"]}
        parsed = await sdk.chat.completions.parse(**ask, response_format=Capital)
        assert parsed.choices[0].message.parsed == Capital(name="Paris")
        assert "name" in json.loads(server.seen.requests[-1].structured.json_schema)["properties"]
        async with sdk.chat.completions.stream(**ask) as events:
            final = await events.get_final_completion()
        assert final.choices[0].message.content == '{"name": "Paris"}'
        assert [model.id async for model in sdk.models.list()] == ["fake"]
        raw = await sdk.chat.completions.with_raw_response.create(**ask)
        assert raw.parse().choices[0].finish_reason == "stop"


async def test_the_sdk_waits_as_long_as_it_is_told_and_nobody_else_retries():
    async with FakeServer([OVERLOADED]) as server, serve_gateway(server.target) as gateway:
        async with sdk_of(gateway, max_retries=1) as sdk:
            with pytest.raises(openai.RateLimitError) as refusal:
                await sdk.chat.completions.create(model="fake", messages=ASKING["messages"])
        assert refusal.value.response.headers["retry-after-ms"] == "250"
        assert refusal.value.response.headers["retry-after"] == "1"
        assert refusal.value.code == "rate_limit_exceeded"
        assert len(server.seen.requests) == 2


async def test_a_lost_connection_to_the_scheduler_is_a_pause():
    broken = [Tokens((1,), "a"), Break(), Tokens((2,), "b"), End()]
    async with FakeServer(broken) as server, serve_gateway(server.target) as gateway:
        raw, _ = await chunks(gateway)
        assert "".join(c["delta"].get("content", "") for chunk in raw for c in chunk["choices"]) == "ab"
        assert server.seen.num_sessions == 2


async def test_an_error_before_the_first_token_has_its_status_and_one_behind_it_is_the_last_event():
    async with FakeServer([OVERLOADED]) as server, serve_gateway(server.target) as gateway:
        early = await gateway.post(CHAT, {**ASKING, "stream": True})
        assert (early.status_code, early.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    broken = [Tokens((1,), "a"), Fail(grpc.StatusCode.INTERNAL, "bug", "STEP_FAILED")]
    async with FakeServer(broken) as server, serve_gateway(server.target) as gateway:
        late = await gateway.post(CHAT, {**ASKING, "stream": True})
        *_, last = events_of(late.text)
        assert json.loads(last)["error"] == {
            "message": "bug", "type": "server_error", "param": None, "code": "step_failed",
        }  # fmt: skip
        assert 'finish_reason":"' not in late.text
        async with sdk_of(gateway) as sdk:
            read = await sdk.chat.completions.create(model="fake", messages=ASKING["messages"], stream=True)
            with pytest.raises(openai.APIError, match="bug"):
                await anext(chunk async for chunk in read if not chunk.choices)


async def test_an_output_that_somebody_cancelled_claims_no_success():
    cut = [Tokens((1,), "a"), End(FinishReason.CANCELLED)]
    async with FakeServer(cut) as server, serve_gateway(server.target) as gateway:
        assert (await gateway.post(CHAT, ASKING)).status_code == 409
        streamed = await gateway.post(CHAT, {**ASKING, "stream": True})
        assert json.loads(events_of(streamed.text)[-1])["error"]["code"] == "cancelled"


HALVES = (
    TokenLogprobs(5, -0.5, (TokenLogprob(5, -0.5, b"\xe2\x82"), TokenLogprob(6, float("-inf"), b"x")), b"\xe2\x82"),
    TokenLogprobs(7, -0.25, (), b"\xac"),
)


def test_log_probabilities_have_the_bytes_of_half_characters():
    answer = ChatAnswer("id", "m", 0, has_logprobs=True, has_token_ids=True, has_usage=False)
    first = answer.chunks(0, Delta("", (5,), 0, 1, HALVES[:1]))
    second = answer.chunks(0, Delta("€", (7,), 1, 1, HALVES[1:]))
    read = [ChatCompletionChunk.model_validate_json(each[6:], strict=True).choices[0] for each in (first, second)]
    (half,), (rest,) = (choice.logprobs.content for choice in read)
    assert (bytes(half.bytes) + bytes(rest.bytes)).decode() == "€"
    assert [(top.token, top.logprob) for top in half.top_logprobs] == [("\ufffd", -0.5), ("x", -9999.0)]
    assert [choice.delta.content for choice in read] == ["", "€"]
    assert [choice.token_ids for choice in read] == [[5], [7]]

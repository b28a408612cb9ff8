"""Requests over a real socket: what the server says is what the caller gets, or a typed error."""

import asyncio

import grpc
import pytest

from paceline_client import (
    AsyncClient,
    FinishReason,
    InvalidRequestError,
    Limits,
    Message,
    OverloadedError,
    Retry,
    Sampling,
    ServerError,
    SlowConsumerError,
    Stopping,
    StreamCorruptedError,
    TokenLogprobs,
    Usage,
)
from paceline_client.testing import End, Fail, FakeServer, Hold, Tokens, echo, say


async def test_a_result_has_everything_the_server_sent():
    script = [
        Tokens((5, 6), "Par", logprob=-0.5),
        Tokens((7,), "is", logprob=-0.25),
        End(
            FinishReason.STOP,
            matched_stop="\n",
            num_prompt_tokens=9,
            num_cached_tokens=4,
            num_draft_tokens=6,
            num_accepted_draft_tokens=5,
        ),
    ]
    async with FakeServer(script) as server, AsyncClient(server.target) as client:
        result = await client.generate("?", request_id="r1")
    assert (result.request_id, result.text, result.token_ids) == ("r1", "Paris", (5, 6, 7))
    assert (result.finish_reason, result.matched_stop) == (FinishReason.STOP, "\n")
    assert (result.usage, result.attempt) == (Usage(9, 4, 3, 6, 5), 1)
    assert result.logprobs[2] == TokenLogprobs(7, -0.25, ())


async def test_a_stream_delivers_deltas_in_order_and_then_the_result():
    async with FakeServer(say("one two three")) as server, AsyncClient(server.target) as client:
        stream = client.stream("?")
        deltas = [delta async for delta in stream]
    assert [delta.text for delta in deltas] == ["one", " two", " three", ""]
    assert [delta.offset for delta in deltas] == [0, 1, 2, 3]
    assert [delta.finish_reason for delta in deltas] == [None, None, None, FinishReason.STOP]
    assert stream.result.text == "one two three"


async def test_several_completions_of_one_prompt():
    script = [
        Tokens((5,), "b", completion=1),
        Tokens((6,), "a", prompt_logprob=-0.5),
        End(FinishReason.LENGTH, completion=1),
        End(),
    ]
    async with FakeServer(script) as server, AsyncClient(server.target) as client:
        stream = client.stream("?", sampling=Sampling(n=2), request_id="r")
        seen = [(delta.index, delta.text, delta.finish_reason) async for delta in stream]
        server_saw = server.seen.requests[0].sampling.n
    assert seen == [(1, "b", None), (0, "a", None), (1, "", FinishReason.LENGTH), (0, "", FinishReason.STOP)]
    result = stream.result
    assert [(c.index, c.text, c.token_ids) for c in result.completions] == [(0, "a", (6,)), (1, "b", (5,))]
    assert (result.text, result.finish_reason, server_saw) == ("a", FinishReason.STOP, 2)
    assert result.prompt_logprobs == (TokenLogprobs(0, -0.5, ()),)


async def test_no_result_before_the_end():
    async with FakeServer(say("one two")) as server, AsyncClient(server.target) as client:
        stream = client.stream("?")
        await anext(stream)
        with pytest.raises(ValueError, match="no result yet"):
            _ = stream.result
        await stream.aclose()


async def test_the_request_arrives_as_it_was_given():
    async with FakeServer(echo) as server, AsyncClient(server.target) as client:
        result = await client.generate(
            messages=[Message("system", "be brief"), {"role": "user", "content": "hello there"}],
            stopping=Stopping(max_tokens=4),
            tenant="blue",
            model="fake",
        )
        sent = server.seen.requests[0]
    assert result.text == "hello there"
    assert [(turn.role, turn.content) for turn in sent.chat.messages] == [
        ("system", "be brief"),
        ("user", "hello there"),
    ]
    assert (sent.stopping.max_tokens, sent.tenant, sent.model, sent.resumable) == (4, "blue", "fake", True)


async def test_a_refused_request_names_its_field_and_the_next_one_works():
    """One bad request costs nobody else anything."""
    refusal = Fail(grpc.StatusCode.INVALID_ARGUMENT, "top_p must be in (0, 1]", "OUT_OF_RANGE", "sampling.top_p")
    scripts = {"bad": [refusal], "good": say("fine")}
    async with FakeServer(lambda request: scripts[request.text]) as server, AsyncClient(server.target) as client:
        with pytest.raises(InvalidRequestError, match="top_p must be") as caught:
            await client.generate("bad")
        assert caught.value.reason == "OUT_OF_RANGE"
        assert [violation.field for violation in caught.value.violations] == ["sampling.top_p"]
        assert (await client.generate("good")).text == "fine"
        assert server.seen.num_sessions == 1


@pytest.mark.parametrize(
    ("false", "what"),
    [
        (Tokens((2,), offset_error=1), "offset 2"),
        (Tokens((2,), offset_error=-1), "offset 0"),
        (Tokens((2,), hash_error=1), "rolling hash"),
    ],
    ids=["gap", "overlap", "hash"],
)
async def test_a_false_delta_is_an_error_and_cancels_the_request(false, what):
    async with FakeServer([Tokens((1,), "a"), false, Hold()]) as server, AsyncClient(server.target) as client:
        stream = client.stream("?", request_id="r1")
        assert (await anext(stream)).text == "a"
        with pytest.raises(StreamCorruptedError, match=what):
            await anext(stream)
        await server.seen_that(lambda seen: seen.cancelled == ["r1"])


LETTERS = [Tokens((number,), text) for number, text in enumerate(["a", " b", " c", " d", " e", " f"])]


async def test_a_slow_reader_loses_its_own_stream_only():
    scripts = {"much": [Tokens((9,), "first"), Hold(), *LETTERS], "little": say("x")}
    limits = Limits(max_buffered_tokens=4)
    async with (
        FakeServer(lambda request: scripts[request.text]) as server,
        AsyncClient(server.target, limits=limits) as client,
    ):
        slow = client.stream("much", request_id="r1")
        assert (await anext(slow)).text == "first"
        await asyncio.to_thread(server.release)
        await server.seen_that(lambda seen: seen.cancelled == ["r1"])
        assert (await client.generate("little")).text == "x"
        for expected in ["a", " b", " c", " d"]:
            assert (await anext(slow)).text == expected
        with pytest.raises(SlowConsumerError):
            await anext(slow)


async def test_an_end_with_an_error_and_no_failure_still_ends():
    """A server that forgets to say why leaves nobody waiting."""
    async with FakeServer([End(reason=None)]) as server, AsyncClient(server.target) as client:
        with pytest.raises(ServerError, match="did not name"):
            await client.generate("?")


async def test_the_limit_of_concurrent_requests_is_an_error_and_not_a_wait():
    async with (
        FakeServer([Tokens((1,), "a"), Hold(), End()]) as server,
        AsyncClient(server.target, limits=Limits(max_concurrent_requests=1), retry=Retry(max_attempts=1)) as client,
    ):
        first = client.stream("?")
        await anext(first)
        with pytest.raises(OverloadedError) as caught:
            await client.generate("?")
        assert caught.value.reason == "CLIENT_LIMIT"


async def test_a_running_request_id_is_refused_and_keeps_running():
    async with FakeServer([Tokens((1,), "a"), Hold(), End()]) as server, AsyncClient(server.target) as client:
        first = client.stream("?", request_id="same")
        await anext(first)
        with pytest.raises(InvalidRequestError, match="same"):
            await client.generate("?", request_id="same")
        await asyncio.to_thread(server.release)
        assert (await first.collect()).text == "a"
        assert server.seen.cancelled == []


async def test_closing_acknowledges_what_has_finished():
    async with FakeServer(say("ok")) as server:
        async with AsyncClient(server.target) as client:
            await client.generate("?", request_id="r1")
        await server.seen_that(lambda seen: seen.acknowledged == ["r1"])


async def test_a_reused_request_id_is_acknowledged_before_it_begins_again():
    """Otherwise the acknowledgement of the first would be taken for one of the second."""
    async with FakeServer(say("ok")) as server, AsyncClient(server.target) as client:
        await client.generate("?", request_id="r1")
        await client.generate("?", request_id="r1")
        assert server.seen.acknowledged == ["r1"]
        assert len(server.seen.requests) == 2

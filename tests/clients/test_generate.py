"""Requests and short calls over a real socket: what the server says is what the caller gets, or a typed error.

Short calls come from the asynchronous and the threaded client alike.
"""

import asyncio
import math
from dataclasses import is_dataclass

import grpc
import pytest

import paceline_client
from paceline.v1 import inference_pb2 as pb
from paceline_client import (
    AsyncClient,
    Client,
    Delta,
    Estimate,
    Explanation,
    FieldViolation,
    FinishReason,
    Limits,
    Message,
    RequestState,
    Result,
    Retry,
    Sampling,
    Stopping,
    Timeout,
    Times,
    TokenLogprobs,
    Usage,
    errors,
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


async def test_a_message_may_be_larger_than_grpc_takes_by_default():
    text = "a" * (5 << 20)
    async with FakeServer([Tokens((5,), text), End()]) as server, AsyncClient(server.target) as client:
        assert (await client.generate("?")).text == text


def test_what_a_caller_gets_back_cannot_be_changed():
    values = [value for value in vars(paceline_client).values() if isinstance(value, type) and is_dataclass(value)]
    assert {Delta, FieldViolation, Result, TokenLogprobs} <= set(values)
    assert [value for value in values if not value.__dataclass_params__.frozen] == []


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
        with pytest.raises(errors.InvalidRequestError, match="top_p must be") as caught:
            await client.generate("bad")
        assert caught.value.reason == "OUT_OF_RANGE"
        assert [violation.field for violation in caught.value.violations] == ["sampling.top_p"]
        assert (await client.generate("good")).text == "fine"
        assert server.seen.num_sessions == 1


async def test_a_false_delta_is_an_error_and_cancels_the_request():
    script = [Tokens((1,), "a"), Tokens((2,), hash_error=1), Hold()]
    async with FakeServer(script) as server, AsyncClient(server.target) as client:
        stream = client.stream("?", request_id="r1")
        assert (await anext(stream)).text == "a"
        with pytest.raises(errors.StreamCorruptedError, match="rolling hash"):
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
        with pytest.raises(errors.SlowConsumerError):
            await anext(slow)


async def test_an_end_with_an_error_and_no_failure_still_ends():
    """A server that forgets to say why leaves nobody waiting."""
    async with FakeServer([End(reason=None)]) as server, AsyncClient(server.target) as client:
        with pytest.raises(errors.ServerError, match="did not name"):
            await client.generate("?")


async def test_the_limit_of_concurrent_requests_is_an_error_and_not_a_wait():
    async with (
        FakeServer([Tokens((1,), "a"), Hold(), End()]) as server,
        AsyncClient(server.target, limits=Limits(max_concurrent_requests=1), retry=Retry(max_attempts=1)) as client,
    ):
        first = client.stream("?")
        await anext(first)
        with pytest.raises(errors.OverloadedError) as caught:
            await client.generate("?")
        assert caught.value.reason == "CLIENT_LIMIT"


async def test_a_running_request_id_is_refused_and_keeps_running():
    async with FakeServer([Tokens((1,), "a"), Hold(), End()]) as server, AsyncClient(server.target) as client:
        first = client.stream("?", request_id="same")
        await anext(first)
        with pytest.raises(errors.InvalidRequestError, match="same"):
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


# Models, tokens, readiness: the calls beside requests


MODEL = pb.Model(name="small", num_executors=1, has_chat_template=True)
MODEL.default_sampling.temperature = 0.25


async def test_models_are_described():
    async with FakeServer(models=[MODEL]) as server, AsyncClient(server.target) as client:
        (listed,) = await client.list_models()
        assert listed == await client.get_model("small") == await client.get_model()
    assert (listed.name, listed.num_executors, listed.num_parameters) == ("small", 1, None)
    assert listed.default_sampling == Sampling(temperature=0.25)


async def test_a_model_that_is_not_served():
    async with FakeServer(models=[MODEL]) as server, AsyncClient(server.target) as client:
        with pytest.raises(errors.NotFoundError) as caught:
            await client.get_model("large")
    assert (caught.value.reason, caught.value.violations[0].field) == ("UNKNOWN_MODEL", "model")


async def test_tokens_there_and_back():
    async with FakeServer() as server, AsyncClient(server.target) as client:
        tokens = await client.tokenize("ab", with_texts=True)
        assert (tokens.token_ids, tokens.token_texts, tokens.max_model_len) == ((97, 98), ("a", "b"), 2048)
        assert (await client.tokenize(messages=[Message("user", "ab")])).token_ids == (97, 98)
        assert await client.detokenize([97, 98]) == "ab"
        with pytest.raises(errors.InvalidRequestError):
            await client.detokenize([-1])
        with pytest.raises(errors.InvalidRequestError, match="exactly one"):
            await client.tokenize()


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda client: client.cancel("\ud800"), "request_id"),
        (lambda client: client.cancel("r", tenant="\ud800"), "tenant"),
        (lambda client: client.cancel(5), "request_id"),
        (lambda client: client.get_model("\udcff"), "model"),
        (lambda client: client.tokenize("a", model="\udcff"), "model"),
        (lambda client: client.tokenize("\udcff"), "text"),
        (lambda client: client.detokenize([1], model="\udcff"), "model"),
        (lambda client: client.detokenize([2**40]), "token_ids"),
    ],
)
async def test_what_has_no_place_in_a_short_call_is_refused_by_name(call, field):
    """As in a request: a lone surrogate or another type is never a protobuf error."""
    async with FakeServer() as server, AsyncClient(server.target) as client:
        with pytest.raises(errors.InvalidRequestError) as caught:
            await call(client)
    assert caught.value.violations[0].field == field


@pytest.mark.parametrize(
    "target",
    [
        *("\udcff:1", b"localhost:1", 5, "", "a:1,,b:1", []),
        *("dns:///", "dns:///x:0", "a:b", ":1", "a:70000", "http://localhost:1/v1"),
    ],
)
def test_a_target_that_leads_nowhere_is_refused_by_name(target):
    with pytest.raises(errors.InvalidRequestError) as caught:
        AsyncClient(target)
    assert caught.value.violations[0].field == "target"


@pytest.mark.parametrize("seconds", [math.inf, 1e300])
async def test_limits_may_be_infinite(seconds):
    """They never pass, rather than at once."""
    timeout = Timeout(connect_seconds=seconds, call_seconds=seconds, total_seconds=seconds)
    async with FakeServer(say("hi")) as server, AsyncClient(server.target, timeout=timeout) as client:
        assert [model.name for model in await client.list_models()] == ["fake"]
        assert (await client.generate("?")).text == "hi"


@pytest.mark.parametrize("times_ms", [None, (250, 1500, 4, 0)])
async def test_a_result_says_where_its_time_went(times_ms):
    script = [Tokens((1,), "a"), End(times_ms=times_ms)]
    async with FakeServer(script) as server, AsyncClient(server.target) as client:
        result = await client.generate("?")
    assert result.times == (None if times_ms is None else Times(0.25, 1.5, 0.004, 0.0))


async def test_a_request_is_explained_while_it_is_known():
    async with FakeServer([Tokens((1, 2), "a"), Hold()]) as server, AsyncClient(server.target) as client:
        async with client.stream("?", request_id="r") as stream:
            await anext(stream)
            explained = await client.explain("r")
        with pytest.raises(errors.NotFoundError):
            await client.explain("other")
    assert explained == Explanation(RequestState.RUNNING, "", 0, 0, "", "fake", 0, 2, 8, 6)


async def test_an_estimate_has_times_or_the_error_that_would_come():
    refusal = Fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", "QUEUE_FULL", retry_after_seconds=2.0)
    scripts = {"taken": say("x"), "refused": [refusal]}
    async with FakeServer(lambda r: scripts[r.text]) as server, AsyncClient(server.target) as client:
        taken, refused = await client.estimate("taken"), await client.estimate("refused")
        assert server.seen.requests == []
    assert taken == Estimate(0.25, 0.01, 5, 1, None)
    assert (type(refused.refusal), refused.refusal.retry_after) == (errors.OverloadedError, 2.0)
    assert (refused.time_to_first_token_seconds, refused.inter_token_seconds) == (None, None)


async def test_ready_when_enough_executors_are_attached():
    async with FakeServer(models=[]) as server, AsyncClient(server.target) as client:
        with pytest.raises(errors.UnavailableError, match="no executor is attached"):
            await client.wait_until_ready(0.15)
        waiting = asyncio.create_task(client.wait_until_ready(20, num_executors=2))
        server.set_models([MODEL])
        await asyncio.sleep(0.15)
        assert not waiting.done()
        server.set_models([MODEL, pb.Model(name="other", num_executors=1)])
        assert [model.name for model in await waiting] == ["small", "other"]


async def test_a_scheduler_that_goes_away_while_it_is_asked_is_waited_for(monkeypatch):
    """Stopping, it cancels the call that it is answering: nobody here did, and its successor is ready soon."""
    async with FakeServer(models=[MODEL]) as server, AsyncClient(server.target) as client:
        answers = [errors.RequestCancelledError("CANCELLED"), await client.list_models()]

        async def list_models():
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(client, "list_models", list_models)
        assert [model.name for model in await client.wait_until_ready(20)] == ["small"]


def test_the_threaded_client_makes_the_same_calls():
    with FakeServer(models=[MODEL]) as server, Client(server.target) as client:
        assert client.wait_until_ready(20)[0].name == client.get_model("small").name == client.list_models()[0].name
        assert client.detokenize(client.tokenize("ab").token_ids) == "ab"
        with pytest.raises(errors.NotFoundError):
            client.cancel("unknown")

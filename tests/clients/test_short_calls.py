"""Models, tokens, readiness: the calls beside requests, from the asynchronous and the threaded client alike."""

import asyncio
import math

import grpc
import pytest

from paceline.v1 import inference_pb2 as pb
from paceline_client import (
    AsyncClient,
    Client,
    Estimate,
    Explanation,
    InvalidRequestError,
    Message,
    NotFoundError,
    OverloadedError,
    RequestCancelledError,
    RequestState,
    Sampling,
    Timeout,
    Times,
    UnavailableError,
)
from paceline_client.testing import End, Fail, FakeServer, Hold, Tokens, say

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
        with pytest.raises(NotFoundError) as caught:
            await client.get_model("large")
    assert (caught.value.reason, caught.value.violations[0].field) == ("UNKNOWN_MODEL", "model")


async def test_tokens_there_and_back():
    async with FakeServer() as server, AsyncClient(server.target) as client:
        tokens = await client.tokenize("ab", with_texts=True)
        assert (tokens.token_ids, tokens.token_texts, tokens.max_model_len) == ((97, 98), ("a", "b"), 2048)
        assert (await client.tokenize(messages=[Message("user", "ab")])).token_ids == (97, 98)
        assert await client.detokenize([97, 98]) == "ab"
        with pytest.raises(InvalidRequestError):
            await client.detokenize([-1])
        with pytest.raises(InvalidRequestError, match="exactly one"):
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
        with pytest.raises(InvalidRequestError) as caught:
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
    with pytest.raises(InvalidRequestError) as caught:
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
        with pytest.raises(NotFoundError):
            await client.explain("other")
    assert explained == Explanation(RequestState.RUNNING, "", 0, 0, "", "fake", 0, 2, 8, 6)


async def test_an_estimate_has_times_or_the_error_that_would_come():
    refusal = Fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", "QUEUE_FULL", retry_after_seconds=2.0)
    scripts = {"taken": say("x"), "refused": [refusal]}
    async with FakeServer(lambda r: scripts[r.text]) as server, AsyncClient(server.target) as client:
        taken, refused = await client.estimate("taken"), await client.estimate("refused")
        assert server.seen.requests == []
    assert taken == Estimate(0.25, 0.01, 5, 1, None)
    assert (type(refused.refusal), refused.refusal.retry_after) == (OverloadedError, 2.0)
    assert (refused.time_to_first_token_seconds, refused.inter_token_seconds) == (None, None)


async def test_ready_when_enough_executors_are_attached():
    async with FakeServer(models=[]) as server, AsyncClient(server.target) as client:
        with pytest.raises(UnavailableError, match="no executor is attached"):
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
        answers = [RequestCancelledError("CANCELLED"), await client.list_models()]

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
        with pytest.raises(NotFoundError):
            client.cancel("unknown")

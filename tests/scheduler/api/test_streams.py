"""The edge without gRPC: requests in, tokens through detokeniser and stop texts, ends told exactly once."""

import asyncio
from dataclasses import replace

import pytest

from paceline.plan.hashes import HASH_START, fold
from paceline.plan.values import FinishReason, RecordId, TokenLogprobs
from paceline.v1.inference_pb2 import GenerateRequest
from paceline_scheduler.api.limits import EdgeLimits
from paceline_scheduler.errors import (
    DrainingError,
    DuplicateRequestError,
    ExecutorFailedError,
    InvalidRequestError,
)
from paceline_scheduler.testing.edge_client import EdgeClient
from paceline_scheduler.testing.tiny import END, LONG_MODEL, TOKENIZER, encode

MODEL = LONG_MODEL
LIMITS = EdgeLimits(max_stream_bytes=4096, max_session_requests=4)


class Client(EdgeClient):
    """One call of a client and the requests it runs."""

    async def start(self, request_id="r1", **fields):
        """Send a request; returns the backend's view of it, or None if it was not submitted."""
        prompt = {} if "token_ids" in fields else {"text": "hi"}
        (handle,) = await self.send(GenerateRequest(**{"request_id": request_id, **prompt, **fields}))
        return self._edge.backend.asked.requests.get(handle)


@pytest.fixture
async def client(edge):
    return Client(edge)


async def test_a_request_reaches_the_backend_complete(client, edge):
    request = await client.start(
        tenant="t",
        stopping={"max_tokens": 7, "stop_token_ids": [3]},
        output={"logprobs": 2},
        cache_salt="salt",
        bypass_prefix_cache=True,
        timeout={"seconds": 2, "nanos": 500_000_000},
    )
    assert request.prompt_token_ids.tolist() == encode("hi")
    assert (request.key, request.model, request.max_tokens) == (RecordId("t", "r1"), "tiny", 7)
    assert (request.end_token_ids, request.num_logprobs, request.deadline_s) == ((END, 3), 2, 2.5)
    assert (request.cache_salt, request.bypass_prefix_cache) == ("salt", True)
    kept = GenerateRequest.FromString(request.origin)
    assert (kept.tenant, kept.stopping.max_tokens, kept.text, len(request.body_digest)) == ("t", 7, "", 16)


async def test_deltas_follow_each_other_without_gap_to_the_finish(client, backend):
    handle = (await client.start()).handle
    tokens = encode("Paris ☃")
    backend.step({handle: tokens[:2]})
    first = client.delta()
    backend.step({handle: [*tokens[2:], END]}, {handle: FinishReason.STOP})
    last = client.delta()
    assert (first.offset, first.token_ids, first.rolling_hash) == (0, tokens[:2], fold(HASH_START, tokens[:2]))
    assert (last.offset, last.token_ids, last.rolling_hash) == (2, [*tokens[2:], END], fold(HASH_START, [*tokens, END]))
    assert first.text + last.text == "Paris ☃"
    finish = last.finish
    assert (finish.reason, finish.stop_token_id, finish.stop_text) == (FinishReason.STOP, END, None)
    assert (finish.num_prompt_tokens, finish.num_cached_tokens) == (len(encode("hi")), 2)
    assert finish.num_output_tokens == len(tokens) + 1
    assert backend.asked.ended == []


async def test_an_ordinary_stop_token_spells_nothing_either(client, backend):
    token_ids = encode("ab!")
    handle = (await client.start(stopping={"stop_token_ids": token_ids[-1:]})).handle
    backend.step({handle: token_ids}, {handle: FinishReason.STOP})
    assert client.delta().text == "ab"


async def test_special_tokens_are_shown_on_request(client, backend):
    tokens = [*encode("a"), TOKENIZER.token_to_id("<|im_start|>")]
    for request_id, skip, text in (("r1", None, "a"), ("r2", False, "a<|im_start|>")):
        handle = (await client.start(request_id, output={"skip_special_tokens": skip})).handle
        backend.step({handle: tokens}, {handle: FinishReason.LENGTH})
        assert client.delta().text == text


@pytest.mark.parametrize("group_size", [1, 2, 3, 100])
async def test_a_stop_text_ends_the_output_at_the_token_that_completes_it(client, backend, group_size):
    tokens = encode("one STOP two")
    num_tokens = next(n for n in range(len(tokens)) if "STOP" in TOKENIZER.decode(tokens[:n]))
    handle = (await client.start(stopping={"stop": ["STOP"]})).handle
    for start in range(0, len(tokens), group_size):
        backend.step({handle: tokens[start : start + group_size]})
    delta = client.delta()
    assert delta.text == "one "
    assert (delta.token_ids, delta.rolling_hash) == (tokens[:num_tokens], fold(HASH_START, tokens[:num_tokens]))
    assert (delta.finish.reason, delta.finish.stop_text) == (FinishReason.STOP, "STOP")
    assert delta.finish.num_output_tokens == num_tokens
    assert backend.asked.ended == [(handle, num_tokens, FinishReason.STOP)]


async def test_a_request_ended_by_a_stop_text_tells_its_cached_tokens(client, backend):
    """The edge ends it, but only the backend knows what came from the prefix cache."""
    backend.num_cached_tokens = 16
    handle = (await client.start(stopping={"stop": ["STOP"]})).handle
    backend.step({handle: encode("a STOP")})
    assert client.delta().finish.num_cached_tokens == 16


async def test_a_stop_text_wins_over_an_end_that_came_later_in_the_same_step(client, backend):
    tokens = [*encode("a STOP b"), END]
    handle = (await client.start(stopping={"stop": ["STOP"]})).handle
    backend.step({handle: tokens}, {handle: FinishReason.STOP})
    delta = client.delta()
    assert (delta.text, delta.finish.stop_text, delta.finish.stop_token_id) == ("a ", "STOP", None)
    assert backend.asked.ended == []


async def test_what_was_held_back_is_shown_when_the_output_ends(client, backend):
    handle = (await client.start(stopping={"stop": ["STOP"]})).handle
    backend.step({handle: encode("one STO")})
    assert client.delta().text == "one "
    backend.step({handle: []}, {handle: FinishReason.LENGTH})
    assert client.delta().text == "STO"


async def test_logprobs_go_with_their_tokens_as_far_as_these_count(client, backend):
    tokens = encode("STOP and more")
    logprobs = tuple(TokenLogprobs(token_id, -1.0, ()) for token_id in tokens)
    handle = (await client.start(stopping={"stop": ["STOP"]}, output={"logprobs": 0})).handle
    backend.step({handle: tokens}, logprobs={handle: logprobs})
    delta = client.delta()
    assert [item.token_id for item in delta.logprobs] == delta.token_ids
    assert len(delta.token_ids) < len(tokens)


async def test_a_gap_in_the_tokens_fails_the_request(client, backend):
    handle = (await client.start()).handle
    backend.lose(handle, 1, 2, 3)
    backend.step({handle: encode("a")})
    assert isinstance(client.collect().failures[0].error, ExecutorFailedError)
    assert backend.asked.ended == [(handle, 0, FinishReason.ERROR)]


async def test_one_request_whose_text_cannot_be_made_leaves_the_others_alone(client, backend):
    broken = (await client.start("broken")).handle
    fine = (await client.start("fine")).handle
    backend.step({broken: [1_000_000], fine: encode("a")})
    content = client.collect()
    assert [(delta.request_id, delta.text) for delta in content.deltas] == [("fine", "a")]
    assert [failure.request_id for failure in content.failures] == ["broken"]


@pytest.mark.parametrize("prompt", ["hello " * 600, "hello " * 6000], ids=["fine", "too-long"])
async def test_a_request_that_is_cancelled_before_it_was_submitted_never_is(client, edge, backend, prompt):
    """Its end was told, so what tokenising would have brought to light is not."""
    starting = asyncio.create_task(client.start(text=prompt))
    await asyncio.sleep(0)
    await edge.cancel(RecordId("", "r1"))
    assert client.delta().finish.reason is FinishReason.CANCELLED
    assert await starting is None
    assert (backend.asked.requests, backend.asked.ended) == ({}, [])


async def test_a_call_that_ends_while_its_request_is_tokenised_submits_nothing(client, edge, backend):
    starting = asyncio.create_task(client.start(text="hello " * 6000))
    await asyncio.sleep(0)
    edge.close_outbox(client.outbox)
    assert await starting is None
    assert (backend.asked.requests, backend.asked.ended) == ({}, [])
    assert await Client(edge).start() is not None


async def test_a_request_id_is_taken_while_its_request_runs(client, backend):
    """Inside its tenant, and not for longer."""
    handle = (await client.start()).handle
    with pytest.raises(DuplicateRequestError):
        await client.start()
    assert await client.start(tenant="other") is not None
    backend.step({handle: [END]}, {handle: FinishReason.STOP})
    assert await client.start() is not None


async def test_draining_refuses_new_requests_and_comebacks_and_waits_for_running_ones(client, edge, backend):
    handle = (await client.start()).handle
    edge.drain("restart", grace_s=3.0)
    assert client.collect().drain.reason == "restart"
    late = Client(edge)
    for request in ({"request_id": "r2"}, {"request_id": "r1", "attachment": 2}):
        with pytest.raises(DrainingError):
            await late.start(**request)
    assert late.collect().drain.grace_s == 3.0
    edge.close_outbox(late.outbox)
    drained = asyncio.create_task(edge.drained())
    backend.step({handle: encode("x")}, {handle: FinishReason.LENGTH})
    await asyncio.sleep(0)
    assert not drained.done()
    edge.close_outbox(client.outbox)
    await drained


async def test_a_request_may_wait_for_a_replaced_model(client, backend):
    backend.served = (replace(LONG_MODEL, name="other", max_model_len=8),)
    assert (await client.start()).model == "other"
    with pytest.raises(InvalidRequestError, match="at most 7 fit"):
        await client.start("r2", token_ids={"ids": [1] * 8})

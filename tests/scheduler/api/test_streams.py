"""The edge without gRPC: requests in, tokens through detokeniser and stop texts, ends told exactly once."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from paceline.plan.hashes import HASH_START, rolling_hashes
from paceline.plan.values import FinishReason, RecordId, TokenLogprobs
from paceline.v1.inference_pb2 import GenerateRequest
from paceline_scheduler.api.limits import EdgeLimits
from paceline_scheduler.errors import (
    DeadlineExceededError,
    DrainingError,
    DuplicateRequestError,
    ExecutorFailedError,
    InvalidRequestError,
    QueueFullError,
    SlowConsumerError,
    UnknownRequestError,
)
from paceline_scheduler.testing.edge_client import EdgeClient, scripted_edge
from paceline_scheduler.testing.tiny import END, LONG_MODEL, TOKENIZER, encode


def rolling_hash(token_ids):
    """The hash a client computes."""
    hashes = np.array([HASH_START], dtype=np.uint64)
    for token_id in token_ids:
        hashes = rolling_hashes(hashes, np.array([token_id], dtype=np.int32))
    return int(hashes[0])


class Client(EdgeClient):
    """One call of a client and the requests it runs."""

    async def start(self, request_id="r1", **fields):
        """Send a request; returns the backend's view of it, or None if it was not submitted."""
        prompt = {} if "token_ids" in fields else {"text": "hi"}
        (handle,) = await self.send(GenerateRequest(**{"request_id": request_id, **prompt, **fields}))
        return self._edge.backend.asked.requests.get(handle)


@pytest.fixture
async def edge():
    """An edge over a scripted backend with one model."""
    async with scripted_edge(LONG_MODEL, EdgeLimits(max_stream_bytes=4096, max_session_requests=4)) as edge:
        yield edge


@pytest.fixture
def backend(edge):
    """Its backend."""
    return edge.backend


@pytest.fixture
async def client(edge):
    """A client's call."""
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
    assert (first.offset, first.token_ids, first.rolling_hash) == (0, tokens[:2], rolling_hash(tokens[:2]))
    assert (last.offset, last.token_ids, last.rolling_hash) == (2, [*tokens[2:], END], rolling_hash([*tokens, END]))
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


async def test_the_rest_of_a_character_comes_with_the_finish(client, backend):
    handle = (await client.start()).handle
    tokens = encode("𝔘")[:-1]
    backend.step({handle: tokens})
    assert client.delta().text == ""
    backend.step({handle: []}, {handle: FinishReason.LENGTH})
    assert client.delta().text == "\ufffd"


@pytest.mark.parametrize("group_size", [1, 2, 3, 100])
async def test_a_stop_text_ends_the_output_at_the_token_that_completes_it(client, backend, group_size):
    tokens = encode("one STOP two")
    num_tokens = next(n for n in range(len(tokens)) if "STOP" in TOKENIZER.decode(tokens[:n]))
    handle = (await client.start(stopping={"stop": ["STOP"]})).handle
    for start in range(0, len(tokens), group_size):
        backend.step({handle: tokens[start : start + group_size]})
    delta = client.delta()
    assert delta.text == "one "
    assert (delta.token_ids, delta.rolling_hash) == (tokens[:num_tokens], rolling_hash(tokens[:num_tokens]))
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


async def test_a_failure_follows_the_output_before_it(client, backend):
    handle = (await client.start()).handle
    backend.step({handle: encode("a")})
    backend.fail(handle, DeadlineExceededError("too late"))
    content = client.collect()
    assert content.deltas[0].text == "a"
    assert isinstance(content.failures[0].error, DeadlineExceededError)
    assert backend.asked.ended == []


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


async def test_a_slow_client_is_cut_and_others_are_not(edge, backend):
    slow, other = Client(edge), Client(edge)
    first, second = (await slow.start("slow")).handle, (await other.start("other")).handle
    for _ in range(60):
        backend.step({first: encode("x" * 40), second: encode("y" * 40)})
        other.collect()
    content = slow.collect()
    assert content.deltas == ()
    assert isinstance(content.failures[0].error, SlowConsumerError)
    assert [(handle, reason) for handle, _, reason in backend.asked.ended] == [(first, FinishReason.ERROR)]
    backend.step({second: encode("!")})
    assert other.delta().text == "!"


async def test_a_client_that_reads_everything_is_never_slow(client, backend):
    handle = (await client.start()).handle
    for _ in range(3):
        backend.step({handle: encode("x" * 2000)})
        assert client.delta().text == "x" * 2000
    assert backend.asked.ended == []


async def test_a_call_that_ends_cancels_its_requests_exactly_once(client, edge, backend):
    handle = (await client.start()).handle
    backend.step({handle: encode("ab")})
    edge.close_outbox(client.outbox)
    assert backend.asked.ended == [(handle, len(encode("ab")), FinishReason.CANCELLED)]
    backend.step({handle: encode("c")})
    assert backend.asked.ended == [(handle, len(encode("ab")), FinishReason.CANCELLED)]


async def test_a_call_that_ends_after_its_request_ends_nothing(client, edge, backend):
    handle = (await client.start()).handle
    backend.step({handle: [END]}, {handle: FinishReason.STOP})
    edge.close_outbox(client.outbox)
    assert backend.asked.ended == []


async def test_a_request_that_is_cancelled_while_it_runs_is_told_so(client, edge, backend):
    handle = (await client.start()).handle
    backend.step({handle: encode("a")})
    await edge.cancel(RecordId("", "r1"))
    delta = client.delta()
    assert (delta.text, delta.finish.reason) == ("a", FinishReason.CANCELLED)
    with pytest.raises(UnknownRequestError):
        await edge.cancel(RecordId("", "r1"))


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


async def test_a_refused_request_leaves_nothing_behind(client, backend):
    with pytest.raises(InvalidRequestError):
        await client.start(token_ids={})
    backend.refusal = QueueFullError("full", 0.5)
    with pytest.raises(QueueFullError):
        await client.start()
    assert client.outbox.num_open == 0
    assert await client.start() is not None


async def test_a_session_runs_a_bounded_number_of_requests(client, backend):
    handles = [(await client.start(f"r{number}")).handle for number in range(4)]
    with pytest.raises(QueueFullError):
        await client.start("r4")
    backend.step({handles[0]: [END]}, {handles[0]: FinishReason.STOP})
    assert await client.start("r4") is not None


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

"""The edge without gRPC: requests in, tokens through detokeniser and stop texts, ends told exactly once.

And several completions of one prompt, and output gathered into larger deltas.
"""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from edge_rig.edge_client import EdgeClient
from edge_rig.tiny import END, LONG_MODEL, TOKENIZER, encode
from paceline.plan.hashes import HASH_START, fold
from paceline.plan.values import FinishReason, RecordId, TokenLogprobs
from paceline.process.callers import ANYBODY
from paceline.v1.inference_pb2 import GenerateRequest
from paceline_scheduler import errors
from paceline_scheduler.api.fan_out import completion_seed
from paceline_scheduler.api.limits import EdgeLimits
from paceline_scheduler.core.answers import Estimate, RequestState

MODEL = LONG_MODEL
LIMITS = EdgeLimits(max_stream_bytes=4096, max_session_requests=16, max_held_tokens=8)


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
    assert isinstance(client.collect().failures[0].error, errors.ExecutorFailedError)
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
    with pytest.raises(errors.DuplicateRequestError):
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
        with pytest.raises(errors.DrainingError):
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
    with pytest.raises(errors.InvalidRequestError, match="at most 7 fit"):
        await client.start("r2", token_ids={"ids": [1] * 8})


# Several completions of one prompt


def asking(n=None, request_id="r1", stopping=None, **output):
    """A request for "hi"."""
    sampling = {"seed": 7, "n": n}
    return GenerateRequest(
        request_id=request_id, text="hi", sampling=sampling, stopping=stopping, output=output, priority=-3
    )


def shape(content):
    """What a message says of completions: index, offset, text and end of each delta."""
    return [
        (delta.index, delta.offset, delta.text, delta.finish and delta.finish.reason.name) for delta in content.deltas
    ]


async def test_every_completion_is_a_request_of_the_core(client, backend):
    handles = await client.send(asking(n=3))
    requests = [backend.asked.requests[handle] for handle in handles]
    assert [request.key for request in requests] == [RecordId("", "r1", index) for index in range(3)]
    assert {request.num_completions for request in requests} == {3}
    assert [request.priority for request in requests] == [-3] * 3
    assert requests[0].sampling.seed == 7
    assert len({request.sampling.seed for request in requests}) == 3
    assert all(np.array_equal(request.prompt_token_ids, encode("hi")) for request in requests)


def test_the_seeds_of_completions_never_change():
    assert completion_seed(5, 0) == 5
    assert completion_seed(5, 1) == 0xBF0BB29BC8431D00
    seeds = {completion_seed(seed, index) for seed in (0, 1, 2**64 - 1) for index in range(16)}
    assert len(seeds) == 48
    assert all(0 <= seed < 2**64 for seed in seeds)


async def test_each_completion_ends_by_itself_and_the_request_with_the_last(client, edge, backend):
    first, second = await client.send(asking(n=2, stopping={"stop": ["STOP"]}))
    backend.step({first: encode("a"), second: encode("b STOP")})
    content = client.collect()
    assert shape(content) == [(0, 0, "a", None), (1, 0, "b ", "STOP")]
    assert backend.asked.ended == [(second, len(encode("b STOP")), FinishReason.STOP)]
    assert client.outbox.num_open == 1

    backend.step({first: [END]}, {first: FinishReason.STOP})
    last = client.delta()
    assert (last.index, last.finish.stop_token_id, last.finish.num_prompt_tokens) == (0, END, len(encode("hi")))
    assert (client.outbox.num_open, len(edge.requests), edge.requests.running) == (0, 0, {})


async def test_a_failure_of_one_completion_ends_all_and_is_told_once(client, backend):
    first, second = await client.send(asking(n=2))
    backend.step({first: encode("a"), second: encode("b")})
    backend.fail(second, errors.DeadlineExceededError("too late"))
    backend.step({first: encode("never told")})
    content = client.collect()
    assert shape(content) == [(0, 0, "a", None), (1, 0, "b", None)]
    assert [failure.request_id for failure in content.failures] == ["r1"]
    assert backend.asked.ended == [(first, len(encode("a")), FinishReason.ERROR)]


async def test_a_cancel_ends_all_that_still_run(client, edge, backend):
    first, *_ = await client.send(asking(n=3))
    backend.step({first: [END]}, {first: FinishReason.STOP})
    await edge.cancel(RecordId("", "r1"))
    ends = {delta.index: delta.finish.reason for delta in client.collect().deltas}
    assert ends == {0: FinishReason.STOP, 1: FinishReason.CANCELLED, 2: FinishReason.CANCELLED}
    assert backend.asked.cancelled == [RecordId("", "r1", 1), RecordId("", "r1", 2)]


async def test_a_cancel_before_the_request_was_submitted_ends_every_completion(client, edge, backend):
    stream = edge.open(asking(n=2), client.outbox, ANYBODY)
    await edge.cancel(RecordId("", "r1"))
    await edge.start(stream)
    content = client.collect()
    assert shape(content) == [(0, 0, "", "CANCELLED"), (1, 0, "", "CANCELLED")]
    assert {delta.rolling_hash for delta in content.deltas} == {HASH_START}
    assert (backend.asked.requests, client.outbox.num_open) == ({}, 0)


async def test_a_client_that_leaves_ends_all_that_still_run(client, edge, backend):
    first, second = await client.send(asking(n=2))
    backend.step({first: [END]}, {first: FinishReason.STOP})
    edge.close_outbox(client.outbox)
    assert backend.asked.ended == [(second, 0, FinishReason.CANCELLED)]


async def test_a_refusal_refuses_all_completions(client, edge, backend):
    backend.refusal = errors.QueueFullError("full", 0.5)
    with pytest.raises(errors.QueueFullError):
        await client.send(asking(n=2))
    for n in (0, 17, -1):
        with pytest.raises(errors.InvalidRequestError):
            await client.send(asking(n=n))
    assert (client.outbox.num_open, len(edge.requests), edge.requests.running) == (0, 0, {})


async def test_a_session_runs_a_bounded_number_of_completions(client, backend):
    await client.send(asking(n=15))
    with pytest.raises(errors.QueueFullError):
        await client.send(asking(n=2, request_id="r2"))
    (handle,) = await client.send(asking(n=1, request_id="r2"))
    backend.step({handle: [END]}, {handle: FinishReason.STOP})
    await client.send(asking(n=1, request_id="r3"))


async def test_a_full_queue_refuses_before_anything_is_read(client, edge, backend):
    """Nothing of the request is validated, let alone tokenised: refusals must be cheap when there are many."""
    backend.num_places = 1
    with pytest.raises(errors.QueueFullError):
        edge.open(asking(n=2), client.outbox, ANYBODY)
    assert (client.outbox.num_open, len(edge.requests)) == (0, 0)
    edge.open(asking(n=1), client.outbox, ANYBODY)


async def test_a_slow_client_loses_all_completions_at_once(client, backend):
    first, second = await client.send(asking(n=2))
    for _ in range(60):
        backend.step({first: encode("x" * 40), second: encode("y")})
    content = client.collect()
    assert content.deltas == ()
    (failure,) = content.failures
    assert isinstance(failure.error, errors.SlowConsumerError)
    assert "read faster" in str(failure.error)
    assert {handle for handle, _, _ in backend.asked.ended} == {first, second}


# Larger deltas


async def test_the_first_token_and_the_end_come_at_once_and_the_rest_in_groups(client, backend):
    (handle,) = await client.send(asking(stream_interval=3))
    text = encode("abcdefgh")
    seen = []
    for position, token_id in enumerate(text):
        backend.step({handle: [token_id]})
        seen += [(position, delta.offset, len(delta.token_ids)) for delta in client.collect().deltas]
    assert seen == [(0, 0, 1), (3, 1, 3), (6, 4, 3)]
    backend.step({handle: [END]}, {handle: FinishReason.STOP})
    last = client.delta()
    assert (last.offset, last.token_ids, last.text) == (7, [*text[7:], END], "h")


async def test_what_was_gathered_comes_before_a_failure(client, backend):
    (handle,) = await client.send(asking(stream_interval=100))
    backend.step({handle: encode("a")})
    backend.step({handle: encode("b")})
    assert client.delta().text == "a"
    backend.fail(handle, errors.DeadlineExceededError("too late"))
    content = client.collect()
    assert (content.deltas[0].text, len(content.failures)) == ("b", 1)


async def test_no_more_is_gathered_than_the_edge_holds(client, backend):
    (handle,) = await client.send(asking(stream_interval=2**31 - 1))
    backend.step({handle: encode("a")})
    client.collect()
    for _ in range(8):
        assert client.collect().is_empty
        backend.step({handle: encode("b")})
    assert client.delta().text == "b" * 8


async def test_grouping_changes_no_text(client, backend):
    tokens = encode("one two STOP three")
    joined = []
    for interval in (1, 2, 5):
        (handle,) = await client.send(asking(stream_interval=interval, stopping={"stop": ["STOP"]}))
        deltas = []
        for token_id in tokens:
            if not deltas or deltas[-1].finish is None:
                backend.step({handle: [token_id]})
                deltas += client.collect().deltas
        texts, ids = "".join(delta.text for delta in deltas), [i for delta in deltas for i in delta.token_ids]
        joined.append((texts, ids, deltas[-1].rolling_hash, deltas[-1].finish))
        assert [delta.offset for delta in deltas] == [
            sum(len(d.token_ids) for d in deltas[:k]) for k in range(len(deltas))
        ]
    assert joined[0] == joined[1] == joined[2]
    assert joined[0][0] == "one two "


async def test_a_stop_text_is_kept_on_request_and_so_is_an_end_that_is_no_special_token(client, backend):
    stopping = {"stop": ["STOP"], "stop_token_ids": encode("!"), "include_stop_str_in_output": True}
    for text, finishes, shown in (("a STOP b", False, "a STOP"), ("a!", True, "a!")):
        (handle,) = await client.send(asking(stopping=stopping))
        backend.step({handle: encode(text)}, {handle: FinishReason.STOP} if finishes else {})
        assert client.delta().text == shown


async def test_a_client_that_reads_is_not_cut_for_what_is_held_of_it(client, backend):
    handles = await client.send(asking(n=16, stream_interval=8))
    texts = dict.fromkeys(handles, "")
    for _ in range(7):
        backend.step({handle: encode("x" * 50) for handle in handles})
        for delta in client.collect().deltas:
            texts[handles[delta.index]] += delta.text
    assert backend.asked.ended == []
    assert len(set(texts.values())) == 1


async def test_the_request_that_keeps_a_slow_client_busy_is_cut_first(client, backend):
    """Not the one that came last: a small request goes on beside a large one that is left unread."""
    (large,) = await client.send(asking(request_id="large"))
    (small,) = await client.send(asking(request_id="small"))
    while not backend.asked.ended:
        backend.step({large: encode("x" * 100), small: encode("y")})
    assert [handle for handle, _, _ in backend.asked.ended] == [large]
    content = client.collect()
    assert ([delta.request_id for delta in content.deltas], content.failures[0].request_id) == (["small"], "large")


async def test_a_large_first_delta_of_one_request_cuts_no_other(edge, backend):
    client = EdgeClient(edge)
    handles = [(await client.send(asking(request_id=f"r{number}", prompt_logprobs=20)))[0] for number in range(3)]
    (plain,) = await client.send(asking(request_id="plain"))
    told = tuple(TokenLogprobs(1, -1.0, ((1, -1.0),) * 20) for _ in range(12))
    every = {handle: encode("a") for handle in (*handles, plain)}
    backend.step(every, prompt_logprobs=dict.fromkeys(handles, told))
    for _ in range(3):
        client.outbox.collect(0)
        backend.step(every)
    assert backend.asked.ended == []


async def test_output_of_ended_completions_keeps_the_client_from_being_read(client, backend):
    """They cannot be cut any more, so nothing new is begun until they were read."""
    (handle,) = await client.send(asking())
    backend.step({handle: encode("x" * 6000)}, {handle: FinishReason.LENGTH})
    waiting = asyncio.create_task(client.outbox.wait_for_room())
    await asyncio.sleep(0)
    assert not waiting.done()
    client.collect()
    client.outbox.beat()
    await client.outbox.wait()
    await waiting


# Explain and Estimate


async def test_a_request_is_explained_from_its_arrival_to_its_end(client, edge, backend):
    stream = edge.open(asking(n=2), client.outbox, ANYBODY)
    preparing = edge.explain(RecordId("", "r1"))
    assert (preparing.state, preparing.waiting_for) == (RequestState.WAITING, "its prompt is being tokenised")
    await edge.start(stream)
    assert edge.explain(RecordId("", "r1")).waiting_for == "a row for 0"
    backend.step({stream.handles[0]: [END]}, {stream.handles[0]: FinishReason.STOP})
    assert edge.explain(RecordId("", "r1")).waiting_for == "a row for 1"
    await edge.cancel(RecordId("", "r1"))
    with pytest.raises(errors.UnknownRequestError):
        edge.explain(RecordId("", "r1"))


async def test_an_estimate_submits_nothing_and_holds_every_refusal(client, edge, backend):
    """Whether the edge would refuse the request or the backend."""
    assert (await edge.estimate(asking())).num_prompt_tokens == len(encode("hi"))
    assert isinstance((await edge.estimate(asking(n=99))).refusal, errors.InvalidRequestError)
    backend.refusal = errors.QueueFullError("full", 0.5)
    assert (await edge.estimate(asking())).refusal is backend.refusal
    backend.refusal = None
    await client.send(asking())
    assert isinstance((await edge.estimate(asking())).refusal, errors.DuplicateRequestError)
    assert len(backend.asked.requests) == 1


async def test_an_estimate_is_of_all_completions_and_of_the_timeout(edge, backend, monkeypatch):
    asked = []

    def estimate(request, _):
        asked.append(request)
        return Estimate(float(request.key.index), 0.1, 3, 0, None)

    monkeypatch.setattr(backend.views, "estimate", estimate)
    backend.num_places = 2
    request = asking(n=2)
    request.timeout.FromSeconds(4)
    assert (await edge.estimate(request)).time_to_first_token_s == 1.0
    assert [(request.key.index, request.deadline_s) for request in asked] == [(0, 4.0), (1, 4.0)]
    assert isinstance((await edge.estimate(asking(n=3))).refusal, errors.QueueFullError)

"""Several completions of one prompt, and output gathered into larger deltas: the edge without gRPC."""

import asyncio

import numpy as np
import pytest

from paceline.plan.hashes import HASH_START
from paceline.plan.values import FinishReason, RecordId, TokenLogprobs
from paceline.process.callers import ANYBODY
from paceline.v1.inference_pb2 import GenerateRequest
from paceline_scheduler.api.fan_out import completion_seed
from paceline_scheduler.api.limits import EdgeLimits
from paceline_scheduler.core.answers import Estimate, RequestState
from paceline_scheduler.errors import (
    DeadlineExceededError,
    DuplicateRequestError,
    InvalidRequestError,
    QueueFullError,
    SlowConsumerError,
    UnknownRequestError,
)
from paceline_scheduler.testing.edge_client import EdgeClient
from paceline_scheduler.testing.tiny import END, LONG_MODEL, encode

MODEL = LONG_MODEL
LIMITS = EdgeLimits(max_stream_bytes=4096, max_session_requests=16, max_held_tokens=8)


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
    backend.fail(second, DeadlineExceededError("too late"))
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
    backend.refusal = QueueFullError("full", 0.5)
    with pytest.raises(QueueFullError):
        await client.send(asking(n=2))
    for n in (0, 17, -1):
        with pytest.raises(InvalidRequestError):
            await client.send(asking(n=n))
    assert (client.outbox.num_open, len(edge.requests), edge.requests.running) == (0, 0, {})


async def test_a_session_runs_a_bounded_number_of_completions(client, backend):
    await client.send(asking(n=15))
    with pytest.raises(QueueFullError):
        await client.send(asking(n=2, request_id="r2"))
    (handle,) = await client.send(asking(n=1, request_id="r2"))
    backend.step({handle: [END]}, {handle: FinishReason.STOP})
    await client.send(asking(n=1, request_id="r3"))


async def test_a_full_queue_refuses_before_anything_is_read(client, edge, backend):
    """Nothing of the request is validated, let alone tokenised: refusals must be cheap when there are many."""
    backend.num_places = 1
    with pytest.raises(QueueFullError):
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
    assert isinstance(failure.error, SlowConsumerError)
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
    backend.fail(handle, DeadlineExceededError("too late"))
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
    with pytest.raises(UnknownRequestError):
        edge.explain(RecordId("", "r1"))


async def test_an_estimate_submits_nothing_and_holds_every_refusal(client, edge, backend):
    """Whether the edge would refuse the request or the backend."""
    assert (await edge.estimate(asking())).num_prompt_tokens == len(encode("hi"))
    assert isinstance((await edge.estimate(asking(n=99))).refusal, InvalidRequestError)
    backend.refusal = QueueFullError("full", 0.5)
    assert (await edge.estimate(asking())).refusal is backend.refusal
    backend.refusal = None
    await client.send(asking())
    assert isinstance((await edge.estimate(asking())).refusal, DuplicateRequestError)
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
    assert isinstance((await edge.estimate(asking(n=3))).refusal, QueueFullError)

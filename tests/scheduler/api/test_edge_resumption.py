"""Clients that come back to their requests: who has a request, what is told to whom, and what is refused."""

import asyncio

import pytest

from edge_rig.edge_client import EdgeClient
from edge_rig.returning_client import ReturningClient
from edge_rig.tiny import END, LONG_MODEL, encode
from paceline.plan.values import FinishReason, RecordId, TokenLogprobs
from paceline.v1.inference_pb2 import GenerateRequest
from paceline_scheduler import errors
from paceline_scheduler.api.limits import EdgeLimits

MODEL = LONG_MODEL
LIMITS = EdgeLimits(max_stream_bytes=4096, max_session_requests=8)
KEY = RecordId("", "r1")
STOP = FinishReason.STOP


def asking(n=None, **fields):
    """A request for "hi"."""
    return GenerateRequest(**{"request_id": "r1", "text": "hi", "sampling": {"n": n}, **fields})


@pytest.fixture
async def client(edge):
    """A client that is attached."""
    client = ReturningClient(edge)
    await client.come()
    return client


async def test_a_request_that_did_not_ask_for_it_is_not_resumable(edge, backend):
    call = EdgeClient(edge)
    (handle,) = await call.send(asking(attachment=2))
    call.leave()
    assert (backend.asked.ended, backend.asked.detached) == ([(handle, 0, FinishReason.CANCELLED)], [])


async def test_the_newer_stream_has_the_request_and_the_older_one_ends(edge, client, backend):
    older = client.call
    backend.step({client.handle: encode("a")})
    await client.come()
    backend.step({client.handle: encode("b")})
    client.read()
    assert client.copy.text == "ab"
    content = older.collect()
    assert (content.deltas, [type(failure.error) for failure in content.failures]) == ((), [errors.SupersededError])
    num_detached = len(backend.asked.detached)
    older.leave()
    assert (len(backend.asked.detached), backend.asked.ended) == (num_detached, [])
    backend.step({client.handle: encode("c")}, {client.handle: FinishReason.LENGTH})
    client.read()
    assert client.copy.text == "abc"


async def test_a_stream_that_is_only_being_prepared_is_taken_over_too(edge, backend):
    client = ReturningClient(edge)
    backend.synced.clear()
    first = asyncio.create_task(client.come())
    await asyncio.sleep(0)
    older, second = client.call, asyncio.create_task(client.come())
    await asyncio.sleep(0)
    backend.synced.set()
    await asyncio.gather(first, second)
    assert [request.attachment for request in backend.asked.resumed] == [1, 2]
    assert isinstance(older.collect().failures[0].error, errors.SupersededError)


# By the edge, and by the backend, whose rules are the core's.
REFUSED = {
    "no token of the model": ({"prior_output_token_ids": [400]}, errors.InvalidRequestError),
    "another hash": ({"resume_hash": 77}, errors.ResumeMismatchError),
    "another body": ({"cache_salt": "another"}, errors.ResumeMismatchError),
    "another tenant": ({"tenant": "thief"}, errors.ResumeMismatchError),
}


@pytest.mark.parametrize(("is_resumable", "is_gone"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("claim", REFUSED)
async def test_a_comeback_that_is_refused_changes_nothing(edge, backend, claim, is_resumable, is_gone):
    client = ReturningClient(edge)
    await client.come(GenerateRequest(resumable=is_resumable, attachment=1))
    backend.step({client.handle: encode("a")})
    client.read()
    if is_gone:
        client.call.leave()
    num_detached, (fields, error) = len(backend.asked.detached), REFUSED[claim]
    refused = client.claim(prior=False)
    refused.MergeFrom(GenerateRequest(**fields))
    with pytest.raises(error):
        await ReturningClient(edge).come(refused)
    assert (backend.asked.ended, len(backend.asked.detached)) == ([], num_detached)
    if is_gone:
        await client.come()
    backend.step({client.handle: encode("b")})
    client.read()
    assert client.copy.text == "ab"


async def test_inside_one_session_nothing_is_told_of_the_older_stream(edge, client):
    """Its end would be taken for that of the newer one, as both have the same name."""
    again = client.claim()
    again.MergeFrom(client.request)
    await client.call.send(again)
    content = client.call.collect()
    assert (content.deltas, content.failures, client.call.outbox.num_open) == ((), (), 1)


@pytest.mark.parametrize(("number", "error"), [(1, errors.StaleAttachmentError), (2, errors.DuplicateRequestError)])
async def test_an_attachment_that_is_not_newer_is_refused_and_disturbs_nobody(edge, client, backend, number, error):
    await client.come(client.claim(number=2))
    with pytest.raises(error) as refusal:
        await ReturningClient(edge).come(GenerateRequest(resumable=True, attachment=number))
    assert getattr(refusal.value, "newest", 2) == 2
    backend.step({client.handle: encode("a")})
    client.read()
    assert client.copy.text == "a"


async def test_nothing_is_admitted_before_it_is_known_what_executors_run(edge, backend):
    backend.synced.clear()
    call = EdgeClient(edge)
    sending = asyncio.create_task(call.send(asking(timeout={"seconds": 5})))
    for _ in range(5):
        await asyncio.sleep(0)
    assert backend.asked.requests == {}
    backend.clock.advance(2.0)
    backend.synced.set()
    (handle,) = await sending
    assert backend.asked.requests[handle].deadline_s == 5.0


@pytest.mark.parametrize("bad_words", [(), ("bye",)])
async def test_what_a_request_that_is_known_says_is_not_tokenised_again(edge, backend, monkeypatch, bad_words):
    client = ReturningClient(edge, asking(sampling={"bad_words": bad_words}))
    await client.come()
    first = backend.asked.requests[client.handle]

    async def refuse(*_):
        raise AssertionError("the backend has the tokens")

    for name in ("token_ids", "bad_word_token_ids"):
        monkeypatch.setattr(edge.texts, name, refuse)
    await client.come()
    again = backend.asked.resumed[-1]
    assert again.prompt_token_ids.tolist() == encode("hi")
    assert again.bad_words == first.bad_words
    assert bool(again.bad_words) == bool(bad_words)


async def test_what_has_begun_is_refused_for_no_full_queue(edge, client, backend, monkeypatch):
    def full(*_):
        raise errors.QueueFullError("full", 1.0)

    client.call.leave()
    monkeypatch.setattr(backend.views, "require_room", full)
    monkeypatch.setattr(backend.views, "require_time", full)
    await client.come()
    other = ReturningClient(edge)
    other.request.request_id = "new"
    with pytest.raises(errors.QueueFullError):
        await other.come()


async def test_every_completion_goes_on_where_its_client_is(edge, backend):
    client = ReturningClient(edge, asking(3, stopping={"stop": ["STOP"]}))
    await client.come()
    first, second, third = client.handles
    backend.step({first: [*encode("a"), END], second: encode("b"), third: encode("c")}, {first: FinishReason.STOP})
    client.read()
    finish, client.copies[0].finish = client.copies[0].finish, None
    client.call.leave()
    assert backend.asked.detached == [second, third]
    backend.step({second: encode(" STOP"), third: encode("d")})
    await client.come()
    client.read()
    assert [copy.text for copy in client.copies] == ["a", "b ", "cd"]
    assert client.copies[0].finish == finish
    assert client.copies[1].finish.stop_text == "STOP"
    assert (client.copies[2].finish, client.call.outbox.num_open) == (None, 1)
    assert backend.asked.ended == [(client.handles[1], len(encode("b") + encode(" STOP")), FinishReason.STOP)]


async def test_a_finish_that_the_client_has_is_not_told_again(edge, backend):
    client = ReturningClient(edge, asking(3))
    await client.come()
    first, second, third = client.handles
    backend.step({first: [*encode("a"), END], second: encode("b"), third: [END]}, dict.fromkeys((first, third), STOP))
    client.read()
    client.call.leave()
    await client.come()
    assert client.call.outbox.num_open == 1
    assert [request.key.index for request in backend.asked.resumed[3:]] == [1]
    assert backend.asked.acknowledged == [KEY, RecordId("", "r1", 2)]
    backend.step({client.handles[1]: [*encode("c"), END]}, {client.handles[1]: STOP})
    client.read()
    assert [copy.text for copy in client.copies] == ["a", "bc", ""]
    assert (len(edge.requests), client.call.outbox.num_open) == (0, 0)


async def test_what_goes_on_of_a_completion_whose_finish_the_client_has_is_ended(edge, backend):
    client = ReturningClient(edge, asking(2))
    await client.come()
    first, _ = client.handles
    backend.step({first: encode("a")})
    client.read()
    client.call.leave()
    claim = client.claim()
    claim.resume_finished = True
    await client.come(claim)
    assert backend.asked.cancelled == [KEY]
    assert client.call.collect().deltas == ()


async def test_a_cancel_while_a_client_comes_back_is_told_behind_what_it_holds(edge, backend):
    """But for a finish that it has; and what nobody listened to ends too."""
    client = ReturningClient(edge, asking(2))
    await client.come()
    first, second = client.handles
    backend.step({first: [END], second: encode("a")}, {first: STOP})
    client.read()
    client.call.leave()
    backend.synced.clear()
    coming = asyncio.create_task(client.come())
    await asyncio.sleep(0)
    cancelling = asyncio.create_task(edge.cancel(KEY))
    await asyncio.sleep(0)
    backend.synced.set()
    await asyncio.gather(coming, cancelling)
    client.read()
    assert [(copy.text, copy.finish.reason) for copy in client.copies] == [("", STOP), ("a", FinishReason.CANCELLED)]
    assert (backend.asked.cancelled, backend.asked.resumed[2:]) == ([RecordId("", "r1", 1)], [])


@pytest.mark.parametrize(("end", "told"), [(" STOP", ("STOP", None)), ("<|im_end|>", (None, END))])
async def test_output_that_is_whole_already_ends_at_once(edge, backend, end, told):
    """By the stop text or the token in what its client holds; nobody knew any more that it had ended."""
    client = ReturningClient(edge, asking(stopping={"stop": ["STOP"]}))
    client.copy.token_ids = encode("a") + encode(end)
    await client.come(client.claim(number=2))
    client.read()
    token_ids, finish = client.copy.token_ids, client.copy.finish
    assert (finish.reason, finish.stop_text, finish.stop_token_id) == (FinishReason.STOP, *told)
    assert backend.asked.ended == [(client.handle, len(token_ids), FinishReason.STOP)]
    assert (len(edge.requests), client.call.outbox.num_open) == (0, 0)


async def test_each_token_has_its_logprobs_once(edge, backend):
    """Also those that were generated while nobody listened."""
    client = ReturningClient(edge, asking(output={"logprobs": 0}))
    await client.come()
    for position, letter in enumerate("abcd"):
        (token_id,), handle = encode(letter), client.handle
        backend.step({handle: [token_id]}, logprobs={handle: (TokenLogprobs(token_id, -1.0 * position, ()),)})
        if letter == "a":
            client.read()
            client.call.leave()
        if letter == "c":
            await client.come()
    client.read()
    assert [item.token_id for item in client.copy.logprobs] == encode("a") + encode("b") + encode("c") + encode("d")


async def test_a_cancel_reaches_a_request_to_which_nobody_listens(edge, backend):
    client = ReturningClient(edge, asking(2))
    await client.come()
    client.call.leave()
    backend.synced.clear()
    cancelling = asyncio.create_task(edge.cancel(KEY))
    await asyncio.sleep(0)
    assert backend.asked.cancelled == []
    backend.synced.set()
    await cancelling
    assert backend.asked.cancelled == [KEY, RecordId("", "r1", 1)]
    for key in (KEY, RecordId("thief", "r1")):
        with pytest.raises(errors.UnknownRequestError):
            await edge.cancel(key)


async def test_a_client_that_leaves_while_it_comes_back_disturbs_nothing(client, backend):
    client.call.leave()
    backend.synced.clear()
    coming = asyncio.create_task(client.come())
    await asyncio.sleep(0)
    client.call.leave()
    backend.synced.set()
    await coming
    assert (len(backend.asked.resumed), len(backend.asked.detached), backend.asked.ended) == (1, 1, [])


async def test_a_request_to_which_nobody_listens_is_explained(edge, backend):
    client = ReturningClient(edge, asking(2))
    await client.come()
    first, _ = client.handles
    backend.step({first: [END]}, {first: FinishReason.STOP})
    client.call.leave()
    assert edge.explain(KEY).waiting_for == "a row for 1"
    with pytest.raises(errors.UnknownRequestError):
        edge.explain(RecordId("thief", "r1"))


async def test_output_that_makes_no_text_fails_the_comeback_alone(client, backend):
    client.call.leave()
    backend.lose(client.handle, 1_000_000)
    client.copy.token_ids = [1_000_000]
    await client.come(client.claim(prior=False))
    client.read()
    assert [str(error) for error in client.errors] == ["the output could not be turned into text"]
    assert backend.asked.ended == [(client.handle, 1, FinishReason.ERROR)]

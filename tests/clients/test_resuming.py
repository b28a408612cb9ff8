"""A request outlives the sessions that carry it: its caller gets every token once, whatever was cut.

In virtual time and without sockets, but for the last test.
"""

import asyncio
import dataclasses

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_client import (
    Client,
    ConflictError,
    FinishReason,
    InvalidRequestError,
    OverloadedError,
    RequestTimeoutError,
    Result,
    ServerError,
    StreamCorruptedError,
    TokenLogprobs,
)
from paceline_client.hashing import rolling_hash
from paceline_client.testing import Break, Die, End, Fail, FakeServer, Hold, Tokens
from paceline_client.testing.rig import MemoryRig
from paceline_scheduler.testing.virtual_time import in_virtual_time, now

GIVEN_UP = Fail(grpc.StatusCode.UNAVAILABLE, "the executor is gone", "GIVEN_UP", retry_after_seconds=1)
NO_EXECUTOR = Fail(grpc.StatusCode.UNAVAILABLE, "no executor serves the model", "NO_EXECUTOR", retry_after_seconds=7)
FULL = Fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full", "QUEUE_FULL", retry_after_seconds=7)
LETTERS = [*(Tokens((number,), letter, logprob=-number) for number, letter in enumerate("abcdef", start=1)), End()]


async def collect(script=LETTERS, *, n=None, break_after=()):
    """The result of a request to a server that plays a script, every delta of it, and the server."""
    rig = MemoryRig(script, break_after=break_after)
    rig.servicer.released.set()
    stream = rig.stream(n=n)
    deltas = [delta async for delta in stream]
    await rig.connection.close()
    return stream.result, deltas, rig


def untroubled(result: Result):
    """A result but for how often the request was placed."""
    completions = tuple(dataclasses.replace(completion, attempt=1) for completion in result.completions)
    return dataclasses.replace(result, completions=completions)


def joined(deltas, index):
    """Text, tokens and log-probabilities that deltas bring to a completion, and how often it ended."""
    own = [delta for delta in deltas if delta.index == index]
    return (
        "".join(delta.text for delta in own),
        tuple(token_id for delta in own for token_id in delta.token_ids),
        tuple(logprobs for delta in own for logprobs in delta.logprobs),
        sum(delta.finish_reason is not None for delta in own),
    )


# Whatever is cut, wherever


@st.composite
def scripts_with_faults(draw):
    """The steps of up to three completions, mixed; the same with faults between them; after how many deltas to cut."""
    num_completions = draw(st.integers(1, 3))
    left = {
        index: [
            Tokens((10 * index + number, number), f"<{index}.{number}>", logprob=-number, completion=index)
            for number in range(draw(st.integers(0, 4)))
        ]
        + [End(draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH])), completion=index)]
        for index in range(num_completions)
    }
    if left[0][:-1]:
        left[0][0] = dataclasses.replace(left[0][0], prompt_logprob=-0.5)
    steps = []
    while left:
        index = draw(st.sampled_from(sorted(left)))
        steps.append(left[index].pop(0))
        left = {index: rest for index, rest in left.items() if rest}
    faulty = list(steps)
    for _ in range(draw(st.integers(0, 3))):
        fault = draw(st.sampled_from([Break(), Die(), Break(grpc.StatusCode.CANCELLED, "")]))
        faulty.insert(draw(st.integers(0, len(faulty))), fault)
    return num_completions, steps, faulty, draw(st.lists(st.integers(0, 5), max_size=4))


@given(scripts_with_faults())
@in_virtual_time
async def test_the_output_is_that_of_an_undisturbed_request(case):
    """Broken sessions, and servers that lose all memory, any number of them: nothing lost, doubled or changed."""
    num_completions, steps, faulty, break_after = case
    undisturbed, expected, _ = await collect(steps, n=num_completions)
    disturbed, deltas, rig = await collect(faulty, n=num_completions, break_after=break_after)
    assert untroubled(disturbed) == undisturbed
    for index in range(num_completions):
        assert joined(deltas, index) == joined(expected, index)
    assert sum(bool(delta.prompt_logprobs) for delta in deltas) == bool(undisturbed.prompt_logprobs)
    # Not at all where the session broke behind the last end: records are forgotten anyway, only later.
    assert rig.seen.acknowledged in (["r"], [])


@in_virtual_time
async def test_each_attachment_says_what_is_held():
    """Cut after two deltas, at once, and after three more: numbered, with offset, hash, attempt and tokens."""
    _, _, rig = await collect(break_after=[2, 0, 3])
    assert rig.seen.acknowledged == ["r"]
    first, *others = rig.seen.requests
    assert (first.resumable, first.attachment, first.HasField("resume_from"), first.HasField("waited")) == (
        (True, 1, False, False)
    )
    assert [request.attachment for request in others] == [2, 3, 4]
    for request, held in zip(others, ([1, 2], [1, 2], [1, 2, 3, 4, 5]), strict=True):
        assert list(request.prior_output_token_ids) == held
        assert (request.resume_from, request.resume_hash) == (len(held), rolling_hash(held))
        assert (request.last_attempt, request.resumable, request.text, request.tenant) == (1, True, "?", "blue")


@in_virtual_time
async def test_each_completion_says_what_is_held_of_it():
    """Also one that has ended, and none of which nothing has come; what has ended is told to nobody twice."""
    script = [Tokens((1,), "a"), End(), Tokens((7, 8), "xy", completion=2), Break(), *_ends_of(1, 2)]
    result, deltas, rig = await collect(script, n=3)
    assert [joined(deltas, index)[3] for index in range(3)] == [1, 1, 1]
    request = rig.seen.requests[1]
    assert (request.resume_from, list(request.prior_output_token_ids)) == (1, [1])
    [point] = request.resume_points
    assert (request.resume_finished, point.resume_finished) == (True, False)
    assert (point.index, point.resume_from, point.last_attempt) == (2, 2, 1)
    assert (point.resume_hash, list(point.prior_output_token_ids)) == (rolling_hash([7, 8]), [7, 8])
    assert [completion.text for completion in result.completions] == ["a", "", "xy"]


def _ends_of(*completions):
    return [End(completion=index) for index in completions]


@in_virtual_time
async def test_a_completion_that_has_its_end_is_not_begun_anew_by_a_server_that_lost_all_memory():
    """Nobody wants more of it: the server is told of the end, and the rest is all there is to do."""

    def script(request):
        end = Tokens((2,), "b") if request.resume_from else End()
        return [Tokens((1,), "a"), end, Tokens((5,), "x", completion=1), Die(), *_ends_of(1), Hold()]

    result, deltas, rig = await collect(script, n=2)
    assert [completion.text for completion in result.completions] == ["a", "x"]
    assert joined(deltas, 0)[1] == (1,)
    assert (rig.seen.cancelled, rig.seen.acknowledged) == ([], ["r"])


@in_virtual_time
async def test_an_attempt_after_all_memory_was_lost_is_counted():
    result, _, rig = await collect([*LETTERS[:3], Die(), *LETTERS[3:]])
    assert (result.text, result.attempt, rig.seen.requests[1].last_attempt) == ("abcdef", 2, 1)
    assert result.logprobs == tuple(TokenLogprobs(number, -number, ()) for number in range(1, 7))


# What the server says instead


@pytest.mark.parametrize("refusal", [FULL, NO_EXECUTOR, GIVEN_UP], ids=lambda refusal: refusal.reason)
@in_virtual_time
async def test_a_refused_resume_is_tried_again(refusal):
    rig = MemoryRig(LETTERS, break_after=[3])
    rig.servicer.resume_refusals = [refusal] * 5
    began = now()
    assert (await rig.stream().collect()).text == "abcdef"
    assert [request.attachment for request in rig.seen.requests] == list(range(1, 8))
    assert now() - began >= 5 * refusal.retry_after_seconds


@in_virtual_time
async def test_who_drives_no_executor_is_asked_on_a_new_connection():
    """Behind the same name there may be another scheduler by now: the one that has the executors."""
    rig = MemoryRig(LETTERS, break_after=[3])
    rig.servicer.resume_refusals = [NO_EXECUTOR, FULL]
    assert (await rig.stream().collect()).text == "abcdef"
    assert rig.server.num_dialled == 3


@in_virtual_time
async def test_a_resume_that_is_refused_for_too_long_fails_with_the_refusal():
    """The server's own words, and when it would like to be asked again."""
    rig = MemoryRig(LETTERS, break_after=[3])
    rig.servicer.resume_refusals = [FULL] * 100
    began = now()
    with pytest.raises(OverloadedError, match="queue is full") as caught:
        await rig.stream().collect()
    assert caught.value.retry_after == 7
    assert 49 <= now() - began <= 60


@in_virtual_time
async def test_a_request_that_was_taken_and_given_up_comes_back_as_known():
    """Before its first token too: it has a place to keep, so no limit on new requests applies to it."""
    rig = MemoryRig(lambda request: LETTERS if request.attachment == 6 else [GIVEN_UP])
    assert (await rig.stream().collect()).text == "abcdef"
    assert rig.seen.requests[5].waited.ToMilliseconds() >= 5000


@in_virtual_time
async def test_a_draining_server_is_asked_again_for_as_long_as_an_outage_may_last():
    """It never had the request, so that comes as a new one, to whoever is there after it."""
    rig = MemoryRig(lambda request: LETTERS if request.waited.seconds >= 20 else [_draining()])
    assert (await rig.stream().collect()).text == "abcdef"
    assert {request.attachment for request in rig.seen.requests} == {1}


def _draining():
    return Fail(grpc.StatusCode.UNAVAILABLE, "shutting down", "DRAINING", retry_after_seconds=1)


@in_virtual_time
async def test_a_slow_consumer_that_was_cut_gets_the_rest():
    """The server dropped what it could not send, and nothing is missing."""
    cut = Fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "read faster", "SLOW_CONSUMER")
    rig = MemoryRig(lambda request: LETTERS if request.resume_from else [*LETTERS[:2], cut])
    assert (await rig.stream().collect()).text == "abcdef"
    assert rig.seen.requests[1].attachment == 2


@pytest.mark.parametrize(
    ("code", "reason", "error"),
    [
        (grpc.StatusCode.ABORTED, "STALE_ATTACHMENT", ConflictError),
        (grpc.StatusCode.FAILED_PRECONDITION, "RESUME_MISMATCH", InvalidRequestError),
        (grpc.StatusCode.INTERNAL, "EXECUTORS_DIED", ServerError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", RequestTimeoutError),
    ],
    ids=lambda value: str(value),
)
@in_virtual_time
async def test_what_cannot_be_gone_on_with_ends(code, reason, error):
    """It is not sent again, and not cancelled: it ended, or belongs to somebody else now."""
    rig = MemoryRig(LETTERS, break_after=[3])
    rig.servicer.resume_refusals = [Fail(code, "no", reason)]
    with pytest.raises(error) as caught:
        await rig.stream().collect()
    await asyncio.sleep(5)
    assert (caught.value.reason, len(rig.seen.requests), rig.seen.cancelled) == (reason, 2, [])


@in_virtual_time
async def test_a_corrupted_token_is_not_gone_on_with():
    """What arrives after a loss must continue what came before it, or the stream ends: the hash spans both."""
    rig = MemoryRig(lambda request: [Tokens((1,), "a"), Die(), Tokens((2,), "b", hash_error=1), Hold()])
    stream = rig.stream()
    with pytest.raises(StreamCorruptedError, match="rolling hash"):
        await stream.collect()
    await rig.until(lambda seen: seen.cancelled == ["r"])


# Over sockets, and with threads


def test_the_threaded_client_survives_the_same():
    script = [*LETTERS[:4], Die(), *LETTERS[4:]]
    with FakeServer(script, break_after=[1, 1]) as server, Client(server.target) as client:
        server.refuse_resumes(dataclasses.replace(FULL, retry_after_seconds=0.01))
        stream = client.stream("?")
        offsets = [delta.offset for delta in stream]
        assert offsets == [0, 1, 2, 3, 4, 5, 6]
        assert (stream.result.text, stream.result.attempt) == ("abcdef", 2)
        assert [request.attachment for request in server.seen.requests] == list(range(1, 1 + len(server.seen.requests)))

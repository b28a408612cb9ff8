"""A request outlives the sessions that carry it: its caller gets every token once, whatever was cut and however long.

In virtual time and without sockets.
"""

import asyncio
import dataclasses

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_client import FinishReason, Limits, Result, Retry, TokenLogprobs, errors
from paceline_client.hashing import rolling_hash
from paceline_client.testing import Break, Die, Drain, End, Fail, Hold, Tokens, say
from paceline_client.testing.rig import MemoryRig
from virtual_time import in_virtual_time, now

GIVEN_UP = Fail(grpc.StatusCode.UNAVAILABLE, "the executor is gone", "GIVEN_UP", retry_after_seconds=1)
NO_EXECUTOR = Fail(grpc.StatusCode.UNAVAILABLE, "no executor serves the model", "NO_EXECUTOR", retry_after_seconds=7)
FULL = Fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full", "QUEUE_FULL", retry_after_seconds=7)
LETTERS = [*(Tokens((number,), letter, logprob=-number) for number, letter in enumerate("abcdef", start=1)), End()]


UNFINISHED = [Tokens((1,), "a"), Hold()]


async def begun(rig, request_id="r", **options):
    """A stream whose first output has come."""
    stream = rig.stream(request_id, **options)
    await anext(stream)
    return stream


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


@pytest.mark.parametrize(
    ("refusal", "num_dialled"),
    [(FULL, 2), (NO_EXECUTOR, 7), (GIVEN_UP, 7)],
    ids=["full", "no executor", "given up"],
)
@in_virtual_time
async def test_a_refused_resume_is_tried_again(refusal, num_dialled):
    """On a new connection where another scheduler may have the executors by now, behind the same name."""
    rig = MemoryRig(LETTERS, break_after=[3])
    rig.servicer.resume_refusals = [refusal] * 5
    began = now()
    assert (await rig.stream().collect()).text == "abcdef"
    assert [request.attachment for request in rig.seen.requests] == list(range(1, 8))
    assert now() - began >= 5 * refusal.retry_after_seconds
    assert rig.server.num_dialled == num_dialled


@in_virtual_time
async def test_a_resume_that_is_refused_for_too_long_fails_with_the_refusal():
    """The server's own words, and when it would like to be asked again."""
    rig = MemoryRig(LETTERS, break_after=[3])
    rig.servicer.resume_refusals = [FULL] * 100
    began = now()
    with pytest.raises(errors.OverloadedError, match="queue is full") as caught:
        await rig.stream().collect()
    assert caught.value.retry_after == 7
    assert 49 <= now() - began <= 60


@pytest.mark.parametrize(("max_outage_s", "total_s"), [(60, None), (20, None), (60, 20)])
@in_virtual_time
async def test_a_new_request_is_sent_again_as_long_as_no_executor_takes_it_up_to_the_clients_own_bound(
    max_outage_s, total_s
):
    """A scheduler of an earlier release refuses it at once, again and again."""
    rig = MemoryRig([NO_EXECUTOR], retry=Retry(draw=lambda: 0.5, max_outage_seconds=max_outage_s))
    began, bound_s = now(), total_s or max_outage_s
    with pytest.raises(errors.UnavailableError, match="no executor") as caught:
        await rig.stream(total_seconds=total_s).collect()
    assert bound_s - NO_EXECUTOR.retry_after_seconds <= now() - began <= bound_s
    assert caught.value.reason == "NO_EXECUTOR"
    assert {request.attachment for request in rig.seen.requests} == {1}, "nobody has ever taken it"
    assert {request.max_outage.ToSeconds() for request in rig.seen.requests} == {bound_s}


@in_virtual_time
async def test_what_the_scheduler_has_waited_for_an_executor_counts():
    rig = MemoryRig([Hold(), NO_EXECUTOR])
    asking = asyncio.ensure_future(rig.stream().collect())
    await asyncio.sleep(60)
    rig.servicer.released.set()
    with pytest.raises(errors.UnavailableError):
        await asking
    assert now() < 61
    assert len(rig.seen.requests) == 1


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
        (grpc.StatusCode.ABORTED, "STALE_ATTACHMENT", errors.ConflictError),
        (grpc.StatusCode.FAILED_PRECONDITION, "RESUME_MISMATCH", errors.InvalidRequestError),
        (grpc.StatusCode.INTERNAL, "EXECUTORS_DIED", errors.ServerError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", errors.RequestTimeoutError),
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


# How long a request waits for a server to go on with it


@in_virtual_time
async def test_a_waiting_request_keeps_its_place():
    """Nothing has come of it: it is sent again with the time it has waited, and nothing else."""
    rig = MemoryRig([Hold(), *LETTERS])
    waiting = asyncio.create_task(rig.stream().collect())
    await rig.until(lambda seen: seen.requests)
    await asyncio.sleep(10)
    rig.server.go_down()
    await asyncio.sleep(2)
    rig.server.come_up()
    await rig.until(lambda seen: len(seen.requests) == 2)
    rig.servicer.released.set()
    assert (await waiting).text == "abcdef"
    again = rig.seen.requests[1]
    assert (again.attachment, again.HasField("resume_from"), again.HasField("last_attempt")) == (2, False, False)
    assert 12 <= again.waited.ToMilliseconds() / 1000 < 15


@pytest.mark.parametrize(("outage_seconds", "most_seconds"), [(0.5, 0.101), (1, 0.11), (10, 1.1)])
@in_virtual_time
async def test_a_server_that_is_back_is_soon_found(outage_seconds, most_seconds):
    """A pause is the shortest one or a tenth of the outage, so nobody waits for long who missed little."""
    rig = MemoryRig([Tokens((1,), "a"), Hold(), End()])
    stream = await begun(rig)
    rig.servicer.released.set()
    rig.server.go_down()
    ending = asyncio.create_task(stream.collect())
    await asyncio.sleep(outage_seconds)
    came_back = now()
    rig.server.come_up()
    await ending
    assert now() - came_back <= most_seconds


@pytest.mark.parametrize(
    ("names", "trouble"),
    [
        (["memory"], "cannot reach memory: conn.*refused"),
        ("ab", r"cannot reach a \(conn.*refused\), b \(conn.*refused\)$"),
    ],
)
@in_virtual_time
async def test_an_outage_has_an_end(names, trouble):
    """The error says what was lost and what is the matter since; the time counts from the last output."""
    rig = MemoryRig([Tokens((1,), "a"), Hold(), Tokens((2,), "b"), Hold()], names=names)
    stream = await begun(rig)
    for server in rig.servers.values():
        server.go_down()
    began = now()
    with pytest.raises(errors.ConnectionLostError, match=rf"connection reset.*since then: {trouble}"):
        await stream.collect()
    assert 58 <= now() - began <= 60


@in_virtual_time
async def test_each_output_ends_an_outage():
    """Several of 50 s are survived by a client that bears 60 s, with a token between them."""
    rig = MemoryRig(LETTERS, break_after=[1, 1, 1])
    stream = rig.stream()
    for _ in range(3):
        await anext(stream)
        rig.servicer.resume_refusals = [FULL] * 7
    began = now()
    assert (await stream.collect()).text == "abcdef"
    assert 49 <= now() - began <= 60


@in_virtual_time
async def test_a_request_with_a_timeout_waits_until_then():
    """Longer than an outage may last else, and then it is the time that is up."""
    rig = MemoryRig(UNFINISHED)
    stream = rig.stream(total_seconds=200)
    began = now()
    await anext(stream)
    rig.server.go_down()
    with pytest.raises(errors.RequestTimeoutError, match=r"connection reset.*since then: cannot reach memory"):
        await stream.collect()
    assert 198 <= now() - began <= 200


@in_virtual_time
async def test_a_server_that_breaks_every_session_is_given_up():
    """It answers, and takes the request, and is gone again: the pauses grow, and are counted together."""
    rig = MemoryRig(UNFINISHED)

    async def keep_breaking():
        while True:
            await asyncio.sleep(0.7)
            rig.server.go_down()
            rig.server.come_up()

    breaking = asyncio.create_task(keep_breaking())
    with pytest.raises(errors.ConnectionLostError, match="connection reset"):
        await rig.stream().collect()
    breaking.cancel()
    assert 15 <= rig.seen.num_sessions <= 40


@in_virtual_time
async def test_a_server_that_takes_no_session_is_given_up():
    """A standby, say: it is asked again, on another connection each time, and then its own words are the error."""
    rig = MemoryRig(LETTERS, retry=Retry(max_outage_seconds=3))
    rig.servicer.session_refusal = Break(message="not the leader")
    with pytest.raises(errors.UnavailableError, match="not the leader"):
        await rig.stream().collect()
    assert rig.seen.num_sessions == rig.server.num_dialled
    assert 10 <= rig.seen.num_sessions <= 25


@in_virtual_time
async def test_what_drains_and_then_ends_is_gone_on_with_elsewhere():
    rig = MemoryRig(
        lambda request: (
            say("new")
            if request.text == "new"
            else [Tokens((1,), "a"), Drain(), Hold(), Break(grpc.StatusCode.OK, ""), Tokens((2,), "b"), End()]
        )
    )
    old = rig.stream("old", text="old")
    await anext(old)
    assert (await rig.stream("new", text="new").collect()).text == "new"
    rig.servicer.released.set()
    assert (await old.collect()).text == "ab"
    assert (rig.seen.num_sessions, rig.server.num_dialled) == (2, 2)


# What leaving it meanwhile means


@in_virtual_time
async def test_leaving_during_an_outage_is_final():
    rig = MemoryRig(lambda request: say("next") if request.text == "next" else UNFINISHED)
    stream = await begun(rig)
    rig.server.go_down()
    reading = asyncio.create_task(anext(stream, "the end"))
    await asyncio.sleep(1)
    await stream.aclose()
    assert await reading == "the end"
    with pytest.raises(errors.RequestCancelledError):
        _ = stream.result
    rig.server.come_up()
    assert (await rig.stream("next", text="next").collect()).text == "next"
    assert rig.seen.cancelled == ["r"]
    assert [request.request_id for request in rig.seen.requests] == ["r", "next"]


@in_virtual_time
async def test_a_reader_that_is_cancelled_during_an_outage_cancels_the_request():
    """Also before its first token, as a server may have taken it."""
    rig = MemoryRig([Hold()])
    reading = asyncio.create_task(rig.stream().collect())
    await rig.until(lambda seen: seen.requests)
    rig.server.go_down()
    await asyncio.sleep(1)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    rig.server.come_up()
    await rig.connection.session(connect_seconds=5)
    await rig.until(lambda seen: seen.cancelled == ["r"])


@in_virtual_time
async def test_leaving_what_broke_off_unnoticed_cancels_it():
    """Nobody was reading when the session broke; another one is open by now, and hears of it."""
    rig = MemoryRig(LETTERS, break_after=[2])
    stream = await begun(rig)
    await asyncio.sleep(1)
    await rig.stream("other").collect()
    await stream.aclose()
    await rig.until(lambda seen: seen.cancelled == ["r"])
    assert [request.request_id for request in rig.seen.requests] == ["r", "other"]


@in_virtual_time
async def test_what_servers_have_forgotten_anyway_is_not_cancelled():
    rig = MemoryRig(UNFINISHED)
    stream = await begun(rig)
    rig.server.go_down()
    await asyncio.sleep(1)
    await stream.aclose()
    await asyncio.sleep(31)
    rig.server.come_up()
    await rig.connection.session(connect_seconds=5)
    await asyncio.sleep(1)
    assert rig.seen.cancelled == []


@in_virtual_time
async def test_closing_the_client_during_an_outage_ends_its_requests():
    rig = MemoryRig(UNFINISHED)
    stream = await begun(rig)
    rig.server.go_down()
    reading = asyncio.create_task(stream.collect())
    await asyncio.sleep(20)
    closed = now()
    await rig.connection.close()
    with pytest.raises(errors.ClientClosedError):
        await reading
    assert now() == closed


@in_virtual_time
async def test_a_reader_that_pauses_is_not_hurried():
    rig = MemoryRig(LETTERS, break_after=[2])
    stream = rig.stream()
    assert (await anext(stream)).text == "a"
    await asyncio.sleep(100)
    assert (await anext(stream)).text == "b"
    assert rig.seen.num_sessions == 1
    assert (await stream.collect()).text == "abcdef"


# The limits of a message, and of this client


@in_virtual_time
async def test_tokens_that_no_message_can_hold_are_left_out():
    """A server that has the record needs only the hash."""
    rig = MemoryRig(LETTERS, break_after=[6], limits=Limits(max_request_bytes=60))
    assert (await rig.stream(text="x" * 40).collect()).text == "abcdef"
    again = rig.seen.requests[1]
    assert (again.resume_from, len(again.prior_output_token_ids)) == (6, 0)


@in_virtual_time
async def test_a_client_that_is_full_waits_for_room():
    """Coming back it finds others in its place: that is no reason to fail."""
    rig = MemoryRig(
        lambda request: [Tokens((1,), "a"), Hold(), Tokens((2,), "b"), End()],
        limits=Limits(max_concurrent_requests=1),
    )
    first = rig.stream("first")
    await anext(first)
    rig.server.go_down()
    rig.server.come_up()
    await asyncio.sleep(0)
    second = rig.stream("second")
    await anext(second)
    reading = asyncio.create_task(first.collect())
    await asyncio.sleep(5)
    await second.aclose()
    rig.servicer.released.set()
    assert (await reading).text == "ab"

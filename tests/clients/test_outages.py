"""Outages: how long a request waits for a server to go on with it, and what leaving it meanwhile means.

In virtual time and without sockets.
"""

import asyncio

import grpc
import pytest

from paceline_client import (
    ClientClosedError,
    ConnectionLostError,
    Limits,
    RequestCancelledError,
    RequestTimeoutError,
    Retry,
    UnavailableError,
)
from paceline_client.testing import Break, Drain, End, Fail, Hold, Tokens, say
from paceline_client.testing.rig import MemoryRig
from paceline_scheduler.testing.virtual_time import in_virtual_time, now

FULL = Fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full", "QUEUE_FULL", retry_after_seconds=7)
LETTERS = [*(Tokens((number,), letter, logprob=-number) for number, letter in enumerate("abcdef", start=1)), End()]


# How long


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
    stream = rig.stream()
    await anext(stream)
    rig.servicer.released.set()
    rig.server.go_down()
    ending = asyncio.create_task(stream.collect())
    await asyncio.sleep(outage_seconds)
    came_back = now()
    rig.server.come_up()
    await ending
    assert now() - came_back <= most_seconds


@pytest.mark.parametrize(
    ("names", "trouble"), [(["memory"], "cannot reach memory: conn.*refused"), ("ab", r"cannot reach a \(.*\), b \(")]
)
@in_virtual_time
async def test_an_outage_has_an_end(names, trouble):
    """The error says what was lost and what is the matter since; the time counts from the last output."""
    rig = MemoryRig([Tokens((1,), "a"), Hold(), Tokens((2,), "b"), Hold()], names=names)
    stream = rig.stream()
    await anext(stream)
    for server in rig.servers.values():
        server.go_down()
    began = now()
    with pytest.raises(ConnectionLostError, match=rf"connection reset.*since then: {trouble}"):
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
    rig = MemoryRig([Tokens((1,), "a"), Hold()])
    stream = rig.stream(total_seconds=200)
    began = now()
    await anext(stream)
    rig.server.go_down()
    with pytest.raises(RequestTimeoutError, match=r"connection reset.*since then: cannot reach memory"):
        await stream.collect()
    assert 198 <= now() - began <= 200


@in_virtual_time
async def test_a_server_that_breaks_every_session_is_given_up():
    """It answers, and takes the request, and is gone again: the pauses grow, and are counted together."""
    rig = MemoryRig([Tokens((1,), "a"), Hold()])

    async def keep_breaking():
        while True:
            await asyncio.sleep(0.7)
            rig.server.go_down()
            rig.server.come_up()

    breaking = asyncio.create_task(keep_breaking())
    with pytest.raises(ConnectionLostError, match="connection reset"):
        await rig.stream().collect()
    breaking.cancel()
    assert 15 <= rig.seen.num_sessions <= 40


@in_virtual_time
async def test_a_server_that_takes_no_session_is_given_up():
    """A standby, say: it is asked again, on another connection each time, and then its own words are the error."""
    rig = MemoryRig(LETTERS, retry=Retry(max_outage_seconds=3))
    rig.servicer.session_refusal = Break(message="not the leader")
    with pytest.raises(UnavailableError, match="not the leader"):
        await rig.stream().collect()
    assert rig.seen.num_sessions == rig.server.num_dialled
    assert 10 <= rig.seen.num_sessions <= 25


@in_virtual_time
async def test_a_server_that_falls_silent_is_left_for_a_new_connection():
    """A frozen process, or a cable that was pulled: the old channel leads nowhere, so another one is dialled."""
    rig = MemoryRig([Tokens((1,), "a"), Hold(), Tokens((2,), "b"), End()], heartbeat_seconds=None)
    stream = rig.stream()
    await anext(stream)
    began = now()
    reading = asyncio.create_task(stream.collect())
    await rig.until(lambda seen: seen.num_sessions == 2)
    assert rig.server.num_dialled == 2
    assert now() - began == pytest.approx(1.5, abs=0.1)
    rig.servicer.released.set()
    assert (await reading).text == "ab"


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


# Leaving


@in_virtual_time
async def test_leaving_during_an_outage_is_final():
    rig = MemoryRig(lambda request: say("next") if request.text == "next" else [Tokens((1,), "a"), Hold()])
    stream = rig.stream()
    await anext(stream)
    rig.server.go_down()
    reading = asyncio.create_task(anext(stream, "the end"))
    await asyncio.sleep(1)
    await stream.aclose()
    assert await reading == "the end"
    with pytest.raises(RequestCancelledError):
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
    stream = rig.stream()
    await anext(stream)
    await asyncio.sleep(1)
    await rig.stream("other").collect()
    await stream.aclose()
    await rig.until(lambda seen: seen.cancelled == ["r"])
    assert [request.request_id for request in rig.seen.requests] == ["r", "other"]


@in_virtual_time
async def test_what_servers_have_forgotten_anyway_is_not_cancelled():
    rig = MemoryRig([Tokens((1,), "a"), Hold()])
    stream = rig.stream()
    await anext(stream)
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
    rig = MemoryRig([Tokens((1,), "a"), Hold()])
    stream = rig.stream()
    await anext(stream)
    rig.server.go_down()
    reading = asyncio.create_task(stream.collect())
    await asyncio.sleep(20)
    closed = now()
    await rig.connection.close()
    with pytest.raises(ClientClosedError):
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

"""A client that knows several schedulers goes to the one that serves, and tells callers nothing but a pause.

In virtual time and without sockets, but for the last tests.
"""

import asyncio

import grpc
import pytest

from paceline_client import (
    AsyncClient,
    ConnectFailedError,
    Retry,
    Timeout,
    UnavailableError,
)
from paceline_client.testing import Break, Drain, End, Fail, FakeServer, Hold, Tokens, say, standby
from paceline_client.testing.rig import MemoryRig
from paceline_scheduler.testing.virtual_time import in_virtual_time, now

LETTERS = [*(Tokens((number,), letter) for number, letter in enumerate("abcdef", start=1)), End()]
HALF = [Tokens((1,), "a"), Hold(), Tokens((2,), "b"), End()]
GIVEN_UP = Fail(grpc.StatusCode.UNAVAILABLE, "the executor is gone", "GIVEN_UP", retry_after_seconds=5)
DRAINING = Fail(grpc.StatusCode.UNAVAILABLE, "the server is going away", "DRAINING", retry_after_seconds=5)


def num_dialled(rig):
    """How often each server was dialled."""
    return {name: server.num_dialled for name, server in rig.servers.items()}


@in_virtual_time
async def test_the_first_address_that_answers_is_taken():
    """Those before it cost no pause, those behind it are left alone."""
    rig = MemoryRig(LETTERS, names="abc")
    rig.servers["a"].go_down()
    assert (await rig.stream().collect()).text == "abcdef"
    assert num_dialled(rig) == {"a": 1, "b": 1, "c": 0}
    assert now() == 0


@in_virtual_time
async def test_a_server_that_dies_costs_no_pause_where_there_is_another():
    rig = MemoryRig(HALF, names="ab")
    rig.servers["b"].servicer.released.set()
    stream = rig.stream()
    await anext(stream)
    rig.servers["a"].go_down()
    assert (await stream.collect()).text == "ab"
    [again] = rig.servers["b"].servicer.seen.requests
    assert (again.attachment, again.resume_from) == (2, 1)
    assert now() == 0


@in_virtual_time
async def test_a_connection_that_was_only_cut_is_made_again_to_the_same_server():
    """It has the request: the standby would only wait to see whether it has died."""
    rig = MemoryRig(LETTERS, names="ab", break_after=[2])
    assert (await rig.stream().collect()).text == "abcdef"
    assert num_dialled(rig) == {"a": 2, "b": 0}


@in_virtual_time
async def test_a_server_that_is_frozen_is_left_for_the_next():
    rig = MemoryRig(HALF, names="ab", heartbeat_seconds=None)
    rig.servers["b"].servicer.released.set()
    stream = rig.stream()
    await anext(stream)
    rig.server.is_up = False
    assert (await stream.collect()).text == "ab"
    assert num_dialled(rig) == {"a": 2, "b": 1}
    assert now() == pytest.approx(1.5, abs=0.1)


@in_virtual_time
async def test_a_standby_leads_to_the_server_that_it_names():
    rig = MemoryRig(LETTERS, names="abc", retry=Retry(max_attempts=1))
    rig.servers["a"].servicer.refusal = standby("c")
    rig.servers["b"].servicer.refusal = standby("c")
    assert (await rig.stream("first").collect()).text == "abcdef"
    rig.servers["c"].servicer.die()
    assert (await rig.stream("second").collect()).text == "abcdef"
    assert num_dialled(rig) == {"a": 1, "b": 0, "c": 2}
    assert now() == 0


@in_virtual_time
async def test_a_standby_that_is_the_only_address_leads_to_the_server_that_it_names():
    rig = MemoryRig(LETTERS, names=["a:1"], others=["b:1"])
    rig.servicer.refusal = standby("b:1")
    assert (await rig.stream("first").collect()).text == "abcdef"
    rig.servers["b:1"].servicer.die()
    assert (await rig.stream("second").collect()).text == "abcdef"
    assert num_dialled(rig) == {"a:1": 1, "b:1": 2}
    assert now() == 0


@in_virtual_time
async def test_what_is_named_outside_the_target_is_tried_after_all_of_the_target():
    rig = MemoryRig(LETTERS, names=["a:1", "b:1"], others=["c:1"])
    rig.servicer.refusal = standby("c:1")
    assert (await rig.stream().collect()).text == "abcdef"
    assert num_dialled(rig) == {"a:1": 1, "b:1": 1, "c:1": 0}
    assert now() == 0


@in_virtual_time
async def test_one_step_leads_outside_the_target_and_no_second():
    """Who is there only because another one named it is not believed about a third."""
    rig = MemoryRig(LETTERS, names=["a:1"], others=["b:1", "c:1"], retry=Retry(max_outage_seconds=3))
    rig.servicer.refusal = standby("b:1")
    rig.servers["b:1"].servicer.refusal = standby("c:1")
    with pytest.raises(UnavailableError, match="stands by"):
        await rig.stream().collect()
    assert rig.servers["b:1"].num_dialled > 0
    assert rig.servers["c:1"].num_dialled == 0


@in_virtual_time
async def test_a_server_outside_the_target_that_goes_is_left_for_the_target():
    rig = MemoryRig(HALF, names=["a:1"], others=["b:1"])
    rig.servicer.refusal = standby("b:1")
    rig.servicer.released.set()
    stream = rig.stream()
    await anext(stream)
    rig.servicer.refusal = None
    rig.servers["b:1"].go_down()
    assert (await stream.collect()).text == "ab"
    assert num_dialled(rig) == {"a:1": 2, "b:1": 2}


@in_virtual_time
async def test_where_the_server_that_a_standby_names_is_not_reached_both_are_said():
    """So that who reads it knows what to mend."""
    rig = MemoryRig(LETTERS, names=["a:1"])
    rig.servicer.refusal = standby("b:1")
    waiting = asyncio.create_task(rig.stream().collect())
    await asyncio.sleep(1)
    trouble = rig.connection.trouble
    waiting.cancel()
    await asyncio.wait([waiting])
    assert trouble == "cannot reach a:1 (this scheduler stands by; b:1 serves), b:1 (connection refused)"


@in_virtual_time
async def test_while_nothing_is_wrong_there_is_no_trouble():
    """Neither before a connection nor with one."""
    rig = MemoryRig(LETTERS)
    before = rig.connection.trouble
    await rig.stream().collect()
    assert (before, rig.connection.trouble) == ("", "")


@pytest.mark.parametrize("refusal", [GIVEN_UP, DRAINING], ids=lambda refusal: refusal.reason)
@in_virtual_time
async def test_who_gives_up_or_drains_leads_to_the_next_address_at_once(refusal):
    rig = MemoryRig(LETTERS, names="ab")
    rig.servicer.refusal = refusal
    assert (await rig.stream().collect()).text == "abcdef"
    assert now() == 0


@in_virtual_time
async def test_new_requests_leave_a_server_that_drains():
    scripts = {"old": [Tokens((1,), "a"), Drain(), Hold(), Tokens((2,), "b"), End()], "new": say("new")}
    rig = MemoryRig(lambda request: scripts[request.text], names="ab")
    old = rig.stream("old", text="old")
    await anext(old)
    await asyncio.sleep(0.1)
    assert (await rig.stream("new", text="new").collect()).text == "new"
    assert [request.text for request in rig.servers["b"].servicer.seen.requests] == ["new"]
    rig.servicer.released.set()
    assert (await old.collect()).text == "ab"


@pytest.mark.parametrize("names", ["a", "ab", "abc"])
@in_virtual_time
async def test_standbys_that_name_each_other_are_asked_in_rounds_with_pauses(names):
    """Not back and forth as fast as the network goes; and for as long as an outage may take, whatever attempts say."""
    rig = MemoryRig(LETTERS, names=names, retry=Retry(max_attempts=1, draw=lambda: 0.5))
    for name, follower in zip(names, names[1:] + names[0], strict=True):
        rig.servers[name].servicer.refusal = standby(follower, retry_after_seconds=0.15)
    waiting = asyncio.create_task(rig.stream().collect())
    await asyncio.sleep(3)
    assert set(num_dialled(rig).values()) <= set(range(10, 21))
    rig.servers[names[-1]].servicer.refusal = None
    woken = now()
    assert (await waiting).text == "abcdef"
    assert now() - woken <= 0.5


@in_virtual_time
async def test_a_request_that_nobody_takes_ends_with_the_words_of_a_standby():
    """When the outage has lasted for as long as it may."""
    rig = MemoryRig(LETTERS, names="ab", retry=Retry(max_outage_seconds=3))
    for server in rig.servers.values():
        server.servicer.refusal = standby("elsewhere:1")
    with pytest.raises(UnavailableError, match="stands by; elsewhere:1 serves") as caught:
        await rig.stream().collect()
    assert caught.value.reason == "STANDBY"
    assert 2 <= now() <= 3


@in_virtual_time
async def test_a_request_held_by_a_standby_stays_while_new_ones_go_elsewhere():
    scripts = {"old": HALF, "new": say("new")}
    rig = MemoryRig(lambda request: scripts[request.text], names="ab")
    old = rig.stream("old", text="old")
    await anext(old)
    rig.servers["a"].go_down()
    reading = asyncio.create_task(old.collect())
    standing_by = rig.servers["b"].servicer
    await asyncio.sleep(0.1)
    standing_by.refusal = standby("a")
    waiting = asyncio.create_task(rig.stream("new", text="new").collect())
    await asyncio.sleep(0.3)
    standing_by.refusal = None
    standing_by.released.set()
    assert (await reading).text == "ab"
    assert (await waiting).text == "new"
    assert [request.attachment for request in standing_by.seen.requests if request.text == "old"] == [2]


@in_virtual_time
async def test_the_error_says_of_each_address_what_the_matter_is():
    rig = MemoryRig(LETTERS, names="ab", retry=Retry(max_outage_seconds=3))
    stream = rig.stream()
    for server in rig.servers.values():
        server.go_down()
    with pytest.raises(ConnectFailedError, match=r"^cannot reach a \(connection refused\), b \(connection refused\)$"):
        await stream.collect()


@in_virtual_time
async def test_an_outage_of_all_servers_is_waited_out():
    rig = MemoryRig(HALF, names="ab")
    rig.servers["b"].servicer.released.set()
    stream = rig.stream()
    await anext(stream)
    for server in rig.servers.values():
        server.go_down()
    reading = asyncio.create_task(stream.collect())
    await asyncio.sleep(20)
    rig.servers["b"].come_up()
    assert (await reading).text == "ab"
    assert 20 <= now() <= 22.5


@in_virtual_time
async def test_a_session_that_nobody_takes_leads_to_the_next_address():
    """A server that ends it before it has said anything, again and again, is not the only one that is asked."""
    rig = MemoryRig(LETTERS, names="ab")
    rig.servicer.session_refusal = Break(message="not now")
    assert (await rig.stream().collect()).text == "abcdef"
    assert now() == 0


async def test_short_calls_follow_to_the_server_that_serves():
    async with FakeServer(say("no")) as waiting, FakeServer(say("yes")) as serving:
        waiting.turn_away(standby(serving.target))
        async with AsyncClient([waiting.target, serving.target]) as client:
            assert [model.name for model in await client.list_models()] == ["fake"]
            assert (await client.generate("?")).text == "yes"
        assert waiting.seen.requests == []


async def test_short_calls_that_nobody_takes_fail_with_the_words_of_a_standby():
    async with FakeServer() as one, FakeServer() as other:
        for server in (one, other):
            server.turn_away(standby("elsewhere:1"))
        timeout = Timeout(connect_seconds=5, call_seconds=0.5)
        async with AsyncClient(f"{one.target},{other.target}", timeout=timeout) as client:
            with pytest.raises(UnavailableError, match="elsewhere:1 serves"):
                await client.list_models()


async def test_a_stream_goes_on_at_another_server():
    async with FakeServer(HALF) as dying, FakeServer(HALF) as other:
        await asyncio.to_thread(other.release)
        async with AsyncClient([dying.target, other.target]) as client:
            stream = client.stream("?")
            assert (await anext(stream)).text == "a"
            await asyncio.to_thread(dying.stop)
            assert (await stream.collect()).text == "ab"
        assert [request.attachment for request in other.seen.requests] == [2]


async def test_a_server_that_dies_between_short_calls():
    async with FakeServer() as dying, FakeServer() as other, AsyncClient([dying.target, other.target]) as client:
        await client.list_models()
        await asyncio.to_thread(dying.stop)
        assert [model.name for model in await client.list_models()] == ["fake"]

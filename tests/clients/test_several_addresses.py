"""A client that knows several schedulers goes to the one that serves, and tells callers nothing but a pause.

Addresses that swallow everything, servers that freeze, what is left while others still use it: nobody is held up. In
virtual time and without sockets, but for the last tests.
"""

import asyncio

import grpc
import grpc.aio
import pytest

from paceline_client import AsyncClient, Retry, Timeout, errors, wire
from paceline_client.testing import Break, Drain, End, Fail, FakeServer, Hold, Tokens, say, standby
from paceline_client.testing.rig import MemoryRig
from paceline_client.testing.servicer import FakeServicer
from virtual_time import in_virtual_time, now

LETTERS = [*(Tokens((number,), letter) for number, letter in enumerate("abcdef", start=1)), End()]
HALF = [Tokens((1,), "a"), Hold(), Tokens((2,), "b"), End()]
GIVEN_UP = Fail(grpc.StatusCode.UNAVAILABLE, "the executor is gone", "GIVEN_UP", retry_after_seconds=5)
DRAINING = Fail(grpc.StatusCode.UNAVAILABLE, "the server is going away", "DRAINING", retry_after_seconds=5)


async def begun(rig, request_id="r", **options):
    """A stream whose first output has come."""
    stream = rig.stream(request_id, **options)
    await anext(stream)
    return stream


def num_dialled(rig):
    return {name: server.num_dialled for name, server in rig.servers.items()}


async def connected(rig, seconds):
    """Where the connection leads to; None: it could not be made in so many seconds."""
    try:
        return (await rig.connection.endpoint(connect_seconds=seconds)).address
    except errors.ConnectFailedError:
        return None


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
    stream = await begun(rig)
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
    stream = await begun(rig)
    rig.server.is_up = False
    assert (await stream.collect()).text == "ab"
    assert num_dialled(rig) == {"a": 2, "b": 1}
    assert now() == pytest.approx(1.5, abs=0.1)


@pytest.mark.parametrize(
    ("standbys", "others", "dialled"),
    [(["a:1", "b:1"], [], {"a:1": 1, "b:1": 0, "c:1": 2}), (["a:1"], ["c:1"], {"a:1": 1, "c:1": 2})],
    ids=["of the target", "outside it"],
)
@in_virtual_time
async def test_a_standby_leads_to_the_server_that_it_names(standbys, others, dialled):
    """Without a pause, and as no attempt; that server is also where the next request goes, when it has died since."""
    names = standbys if others else [*standbys, "c:1"]
    rig = MemoryRig(LETTERS, names=names, others=others, retry=Retry(max_attempts=1))
    for name in standbys:
        rig.servers[name].servicer.refusal = standby("c:1")
    assert (await rig.stream("first").collect()).text == "abcdef"
    rig.servers["c:1"].servicer.die()
    assert (await rig.stream("second").collect()).text == "abcdef"
    assert num_dialled(rig) == dialled
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
    with pytest.raises(errors.UnavailableError, match="stands by"):
        await rig.stream().collect()
    assert rig.servers["b:1"].num_dialled > 0
    assert rig.servers["c:1"].num_dialled == 0


@in_virtual_time
async def test_a_server_outside_the_target_that_goes_is_left_for_the_target():
    rig = MemoryRig(HALF, names=["a:1"], others=["b:1"])
    rig.servicer.refusal = standby("b:1")
    rig.servicer.released.set()
    stream = await begun(rig)
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
    old = await begun(rig, "old", text="old")
    await asyncio.sleep(0.1)
    assert (await rig.stream("new", text="new").collect()).text == "new"
    seen = [[request.text for request in server.servicer.seen.requests] for server in rig.servers.values()]
    assert seen == [["old"], ["new"]]
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
    rig = MemoryRig(LETTERS, names="ab", retry=Retry(max_outage_seconds=3))
    for server in rig.servers.values():
        server.servicer.refusal = standby("elsewhere:1")
    with pytest.raises(errors.UnavailableError, match="stands by; elsewhere:1 serves") as caught:
        await rig.stream().collect()
    assert caught.value.reason == "STANDBY"
    assert 2 <= now() <= 3


@in_virtual_time
async def test_a_request_held_by_a_standby_stays_while_new_ones_go_elsewhere():
    scripts = {"old": HALF, "new": say("new")}
    rig = MemoryRig(lambda request: scripts[request.text], names="ab")
    old = await begun(rig, "old", text="old")
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
async def test_a_session_that_nobody_takes_leads_to_the_next_address():
    """A server that ends it before it has said anything, again and again, is not the only one that is asked."""
    rig = MemoryRig(LETTERS, names="ab")
    rig.servicer.session_refusal = Break(message="not now")
    assert (await rig.stream().collect()).text == "abcdef"
    assert now() == 0


# What says nothing


@pytest.mark.parametrize(("refuses_for_seconds", "why"), [(9.4, "connection refused"), (5.0, "no answer in time")])
@in_virtual_time
async def test_the_error_says_what_the_last_whole_attempt_found(refuses_for_seconds, why):
    rig = MemoryRig(LETTERS)
    rig.server.go_down()
    connecting = asyncio.create_task(rig.connection.endpoint(connect_seconds=10))
    await asyncio.sleep(refuses_for_seconds)
    rig.server.is_silent = True
    with pytest.raises(errors.ConnectFailedError, match=f"^cannot reach memory: {why}$"):
        await connecting
    assert now() <= 10


@in_virtual_time
async def test_the_error_says_nothing_of_an_outage_that_is_over():
    """The server refused once and served since: now that it is silent nobody says that it refuses."""
    rig = MemoryRig(LETTERS)
    rig.server.go_down()
    reading = asyncio.create_task(rig.stream().collect())
    await asyncio.sleep(1)
    rig.server.come_up()
    await reading
    rig.server.is_silent = True
    with pytest.raises(errors.ConnectFailedError, match=r"^cannot reach memory: no answer in time$"):
        await rig.connection.endpoint(connect_seconds=1)


@pytest.mark.parametrize("seconds", [0.2, 0.8, 5.0])
@in_virtual_time
async def test_an_address_that_swallows_everything_holds_up_nobody_for_long(seconds):
    rig = MemoryRig(LETTERS, names="ab")
    rig.server.is_silent = True
    assert await connected(rig, seconds) == "b"
    assert now() == pytest.approx(0.15)
    await asyncio.sleep(0)
    assert [channel.is_closed for channel in rig.server.channels] == [True]


@in_virtual_time
async def test_callers_that_are_shorter_than_a_head_start_reach_the_next_address_in_turn():
    """Whoever gives up, by a limit or because it is cancelled, has the next caller begin elsewhere."""
    rig = MemoryRig(LETTERS, names="ab")
    rig.server.is_silent = True
    assert await connected(rig, 0.1) is None
    assert await connected(rig, 0.1) == "b"
    other = MemoryRig(LETTERS, names="ab")
    other.server.is_silent = True
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(connected(other, 10), 0.1)
    assert await asyncio.wait_for(connected(other, 10), 0.1) == "b"
    assert [channel.is_closed for channel in other.server.channels] == [True]


@in_virtual_time
async def test_a_slow_connection_to_the_server_that_was_cut_off_wins_over_the_standby():
    rig = MemoryRig(LETTERS, names="ab", break_after=[2])
    for server in rig.servers.values():
        server.connect_seconds = 0.25
    assert (await rig.stream().collect()).text == "abcdef"
    assert [request.attachment for request in rig.seen.requests] == [1, 2]
    assert [server.num_dialled for server in rig.servers.values()] == [2, 2]
    await asyncio.sleep(0)
    assert [channel.is_closed for channel in rig.servers["b"].channels] == [True, True]


@in_virtual_time
async def test_closing_while_connecting_ends_the_attempt_and_closes_its_channel():
    rig = MemoryRig(LETTERS)
    rig.server.connect_seconds = 1.0
    request = asyncio.create_task(rig.stream().collect())
    await asyncio.sleep(0.5)
    await rig.connection.close()
    with pytest.raises(errors.ClientClosedError):
        await request
    assert [channel.is_closed for channel in rig.server.channels] == [True]
    assert rig.seen.requests == []
    assert now() == 0.5


# What is about one request only


@in_virtual_time
async def test_a_model_without_an_executor_ends_nothing_of_another_model():
    nobody = Fail(grpc.StatusCode.UNAVAILABLE, "every executor is draining", "NO_EXECUTOR", retry_after_seconds=0.05)
    rig = MemoryRig(lambda request: HALF if request.text == "y" else [nobody], retry=Retry(max_attempts=1))
    long = await begun(rig, "long", text="y")
    for number in range(12):
        with pytest.raises(errors.UnavailableError):
            await rig.stream(f"x-{number}", text="x").collect()
    assert rig.server.num_dialled == 1
    rig.servicer.released.set()
    assert (await long.collect()).text == "ab"


@in_virtual_time
async def test_a_channel_that_was_left_stays_open_while_a_call_is_under_way():
    rig = MemoryRig(LETTERS)
    endpoint = await rig.connection.endpoint(connect_seconds=1)
    with rig.connection.use(endpoint):
        rig.connection.turned_away(endpoint, errors.UnavailableError("elsewhere"))
        assert await connected(rig, 1) == "memory"
        assert [channel.is_closed for channel in rig.server.channels] == [False, False]
    await asyncio.sleep(0)
    assert [channel.is_closed for channel in rig.server.channels] == [True, False]


@in_virtual_time
async def test_a_cancellation_is_not_lost_at_a_standby():
    rig = MemoryRig(LETTERS, names="ab")
    rig.servicer.refusal = standby("b")
    for name in ("left", "again"):
        rig.connection.cancel_later("blue", name)
    assert (await rig.stream("again").collect()).text == "abcdef"
    await asyncio.sleep(1)
    cancelled = [server.servicer.seen.cancelled for server in rig.servers.values()]
    assert cancelled == [["left", "again"], ["left"]]


@in_virtual_time
async def test_a_request_whose_own_time_is_up_says_so():
    """Rather than that a standby stands by."""
    rig = MemoryRig(LETTERS, names="ab")
    for server in rig.servers.values():
        server.servicer.refusal = standby("elsewhere:1")
    with pytest.raises(errors.RequestTimeoutError, match="stands by"):
        await rig.stream(total_seconds=0.01).collect()


# Over sockets


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
            with pytest.raises(errors.UnavailableError, match="elsewhere:1 serves"):
                await client.list_models()


async def test_a_server_that_dies_between_short_calls():
    async with FakeServer() as dying, FakeServer() as other, AsyncClient([dying.target, other.target]) as client:
        await client.list_models()
        await asyncio.to_thread(dying.stop)
        assert [model.name for model in await client.list_models()] == ["fake"]


async def test_short_calls_leave_a_server_that_does_not_answer(monkeypatch):
    frozen_models, answer = [object()], FakeServicer.ListModels

    async def list_models(self, request, context):
        if self.models == frozen_models:
            await asyncio.Event().wait()
        return await answer(self, request, context)

    monkeypatch.setattr(FakeServicer, "ListModels", list_models)
    timeout = Timeout(call_seconds=0.2)
    async with (
        FakeServer(models=frozen_models) as frozen,
        FakeServer() as other,
        AsyncClient([frozen.target, other.target], timeout=timeout) as client,
    ):
        with pytest.raises(errors.RequestTimeoutError):
            await client.list_models()
        assert [model.name for model in await client.list_models()] == ["fake"]


async def test_a_short_call_that_lost_its_connection_is_made_again():
    async with FakeServer() as dying, FakeServer() as other, AsyncClient([dying.target, other.target]) as client:
        await client.ensure_connected()
        lost = [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED]

        async def call(channel, seconds):
            if lost:
                nothing = grpc.aio.Metadata()
                raise grpc.aio.AioRpcError(lost.pop(), nothing, nothing, details="Socket closed")
            return await wire.list_models(channel, timeout_seconds=seconds)

        assert [model.name for model in await client._call(call)] == ["fake"]

"""Addresses that swallow everything, servers that freeze, what is left while others still use it: nobody is held up.

In virtual time and without sockets, but for the last tests.
"""

import asyncio

import grpc
import grpc.aio
import pytest

from paceline_client import (
    AsyncClient,
    ClientClosedError,
    ConnectFailedError,
    RequestTimeoutError,
    Retry,
    Timeout,
    UnavailableError,
    wire,
)
from paceline_client.testing import End, Fail, FakeServer, Hold, Tokens, standby
from paceline_client.testing.rig import MemoryRig
from paceline_client.testing.servicer import FakeServicer
from paceline_scheduler.testing.virtual_time import in_virtual_time, now

LETTERS = [*(Tokens((number,), letter) for number, letter in enumerate("abcdef", start=1)), End()]
HALF = [Tokens((1,), "a"), Hold(), Tokens((2,), "b"), End()]


async def connected(rig, seconds):
    """Where the connection leads to; None: it could not be made in so many seconds."""
    try:
        return (await rig.connection.endpoint(connect_seconds=seconds)).address
    except ConnectFailedError:
        return None


@pytest.mark.parametrize(("refuses_for_seconds", "why"), [(9.4, "connection refused"), (5.0, "no answer in time")])
@in_virtual_time
async def test_the_error_says_what_the_last_whole_attempt_found(refuses_for_seconds, why):
    rig = MemoryRig(LETTERS)
    rig.server.go_down()
    connecting = asyncio.create_task(rig.connection.endpoint(connect_seconds=10))
    await asyncio.sleep(refuses_for_seconds)
    rig.server.is_silent = True
    with pytest.raises(ConnectFailedError, match=f"^cannot reach memory: {why}$"):
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
    with pytest.raises(ConnectFailedError, match=r"^cannot reach memory: no answer in time$"):
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
    with pytest.raises(ClientClosedError):
        await request
    assert [channel.is_closed for channel in rig.server.channels] == [True]
    assert rig.seen.requests == []
    assert now() == 0.5


# What is about one request only


@in_virtual_time
async def test_a_model_without_an_executor_ends_nothing_of_another_model():
    nobody = Fail(grpc.StatusCode.UNAVAILABLE, "every executor is draining", "NO_EXECUTOR", retry_after_seconds=0.05)
    rig = MemoryRig(lambda request: HALF if request.text == "y" else [nobody], retry=Retry(max_attempts=1))
    long = rig.stream("long", text="y")
    await anext(long)
    for number in range(12):
        with pytest.raises(UnavailableError):
            await rig.stream(f"x-{number}", text="x").collect()
    assert rig.server.num_dialled == 1
    rig.servicer.released.set()
    assert (await long.collect()).text == "ab"


@in_virtual_time
async def test_a_channel_that_was_left_stays_open_while_a_call_is_under_way():
    rig = MemoryRig(LETTERS)
    endpoint = await rig.connection.endpoint(connect_seconds=1)
    with rig.connection.use(endpoint):
        rig.connection.turned_away(endpoint, UnavailableError("elsewhere"))
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
    with pytest.raises(RequestTimeoutError, match="stands by"):
        await rig.stream(total_seconds=0.01).collect()


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
        with pytest.raises(RequestTimeoutError):
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

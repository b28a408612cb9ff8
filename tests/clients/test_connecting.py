"""Connections over real sockets that fail, break, fall silent and come back."""

import asyncio
import socket

import grpc
import pytest

from paceline_client import AsyncClient, ConnectFailedError, ConnectionLostError, Keepalive, Retry, Timeout
from paceline_client.testing import Break, End, Fail, FakeServer, Hold, Tokens, say

QUICK = Retry(initial_delay_seconds=0.01)


@pytest.fixture
def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def test_where_every_address_refuses_the_time_for_that_counts(free_port):
    """Nobody is slow there: long before the time to connect is up. `connect` tells it at once, a request later."""
    target, timeout = f"127.0.0.1:{free_port},localhost:{free_port}", Timeout(connect_seconds=3600, refused_seconds=0.2)
    client = AsyncClient(target, timeout=timeout)
    for call in (AsyncClient.connect(target, timeout=timeout), client.generate("?"), client.list_models()):
        with pytest.raises(ConnectFailedError, match=rf"127\.0\.0\.1:{free_port} \(.*refused"):
            await call
    await client.close()


async def test_a_server_that_is_only_slow_is_given_the_time_to_connect(free_port):
    """One address refuses, the other one says nothing: that one may yet answer."""
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        target = f"127.0.0.1:{free_port},127.0.0.1:{mute.getsockname()[1]}"
        async with AsyncClient(target, timeout=Timeout(connect_seconds=1, refused_seconds=0.01)) as client:
            connecting = asyncio.create_task(client.ensure_connected())
            await asyncio.sleep(0.5)
            assert not connecting.done()
            with pytest.raises(ConnectFailedError):
                await connecting


async def test_running_requests_go_on_when_the_connection_breaks():
    """All of them, over one new session, as their next attachments."""
    script = {"a": [Tokens((1,), "a"), Hold(), End()], "b": [Tokens((1,), "b"), Break(), Tokens((2,), "c"), End()]}
    async with FakeServer(lambda request: script[request.text]) as server, AsyncClient(server.target) as client:
        first = client.stream("a")
        assert (await anext(first)).text == "a"
        assert (await client.generate("b")).text == "bc"
        await asyncio.to_thread(server.release)
        assert (await first.collect()).text == "a"
        assert sorted((request.text, request.attachment) for request in server.seen.requests) == [
            *[("a", 1), ("a", 2)],
            *[("b", 1), ("b", 2)],
        ]
        assert server.seen.num_sessions == 2


async def test_each_request_gets_an_error_of_its_own():
    """An exception shared by tasks would collect all their tracebacks."""
    impatient = Retry(max_outage_seconds=0.1)
    async with FakeServer([Tokens((1,), "a"), Hold()]) as server, AsyncClient(server.target, retry=impatient) as client:
        streams = [client.stream("?") for _ in range(2)]
        for stream in streams:
            await anext(stream)
        await asyncio.to_thread(server.stop)
        first, second = await asyncio.gather(*(anext(stream) for stream in streams), return_exceptions=True)
    assert isinstance(first, ConnectionLostError)
    assert isinstance(second, ConnectionLostError)
    assert first is not second


async def test_a_request_survives_a_server_that_is_replaced(free_port):
    """The new one has never heard of it: it goes on from the tokens that the client has. So do calls to come."""
    script = [Tokens((1,), "a"), Hold(), Tokens((2,), "b"), End()]
    async with AsyncClient(f"127.0.0.1:{free_port}", retry=QUICK) as client:
        stream = client.stream("?")
        async with FakeServer(script, port=free_port):
            assert (await anext(stream)).text == "a"
        async with FakeServer(script, port=free_port) as server:
            await asyncio.to_thread(server.release)
            assert (await stream.collect()).text == "ab"
        async with FakeServer(say("new"), port=free_port):
            assert (await client.list_models())[0].name == "fake"
            assert (await client.generate("?")).text == "new"
    assert stream.result.attempt == 2


async def test_a_server_that_falls_silent_counts_as_lost():
    """No message and no heartbeat: a frozen process, or a cable that was pulled."""
    keepalive = Keepalive(heartbeat_seconds=0.05, silence_seconds=0.2)
    async with (
        FakeServer([Tokens((1,), "a"), Hold()], heartbeat_seconds=None) as server,
        AsyncClient(server.target, keepalive=keepalive, retry=Retry(max_outage_seconds=0.1)) as client,
    ):
        stream = client.stream("?")
        await anext(stream)
        with pytest.raises(ConnectionLostError, match="no sign of life"):
            await anext(stream)


async def test_a_session_that_is_never_taken_is_tried_again():
    """Until somebody takes it, on a connection of its own each time; nothing is lost, for nothing had begun."""
    async with FakeServer(say("yes")) as server, AsyncClient(server.target, retry=QUICK) as client:
        server.refuse_sessions(Break(message="not the leader"))
        waiting = asyncio.create_task(client.generate("?"))
        await server.seen_that(lambda seen: seen.num_sessions == 3)
        server.refuse_sessions(None)
        assert (await waiting).text == "yes"


async def test_a_session_that_the_server_cancels_counts_as_lost():
    """It is resumed, and again when that is refused."""
    script = [Tokens((1,), "a"), Break(grpc.StatusCode.CANCELLED, ""), Tokens((2,), "b"), End()]
    async with FakeServer(script) as server, await AsyncClient.connect(server.target) as client:
        server.refuse_resumes(Fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry_after_seconds=0.01))
        assert (await client.generate("?")).text == "ab"
        assert [request.attachment for request in server.seen.requests] == [1, 2, 3]
        assert server.seen.num_sessions == 2

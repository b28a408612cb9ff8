"""Every way of leaving a request tells the server, and leaves nothing behind."""

import asyncio
import gc

import grpc
import pytest

from paceline_client import (
    AsyncClient,
    ClientClosedError,
    FinishReason,
    Keepalive,
    NotFoundError,
    RequestCancelledError,
    RequestTimeoutError,
    Sampling,
    ServerError,
    Timeout,
)
from paceline_client.testing import End, Fail, FakeServer, Hold, Tokens, say

QUICK = Keepalive(heartbeat_seconds=0.02)
UNFINISHED = [Tokens((1,), "a"), Hold()]


def cancelled_is(*request_ids):
    """The condition that exactly these were cancelled."""
    return lambda seen: seen.cancelled == list(request_ids)


async def test_breaking_out_of_the_loop_cancels():
    """No close is needed: dropping the stream is enough."""
    async with FakeServer(UNFINISHED) as server, AsyncClient(server.target) as client:
        async for _ in client.stream("?", request_id="r1"):
            break
        gc.collect()
        await server.seen_that(cancelled_is("r1"))


async def test_leaving_the_block_cancels():
    async with FakeServer(UNFINISHED) as server, AsyncClient(server.target) as client:
        async with client.stream("?", request_id="r1") as stream:
            await anext(stream)
        await server.seen_that(cancelled_is("r1"))


async def test_cancelling_the_task_cancels():
    async with FakeServer([Hold()]) as server, AsyncClient(server.target) as client:
        task = asyncio.create_task(client.generate("?", request_id="r1"))
        await server.seen_that(lambda seen: len(seen.requests) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await server.seen_that(cancelled_is("r1"))


async def test_running_out_of_time_cancels():
    async with FakeServer(UNFINISHED) as server, AsyncClient(server.target) as client:
        with pytest.raises(RequestTimeoutError, match=r"0\.2 s"):
            await client.generate("?", request_id="r1", timeout=Timeout(total_seconds=0.2))
        await server.seen_that(cancelled_is("r1"))
        assert server.seen.requests[0].timeout.ToMilliseconds() == 200


async def test_a_finished_stream_cancels_nothing():
    async with FakeServer(say("a b")) as server, AsyncClient(server.target) as client:
        async with client.stream("?") as stream:
            await stream.collect()
        assert (await client.generate("?")).text == "a b"
        assert server.seen.cancelled == []


async def test_a_stream_that_was_never_read_sends_nothing():
    async with FakeServer(UNFINISHED) as server, AsyncClient(server.target) as client:
        async with client.stream("?"):
            pass
        assert server.seen.requests == []


async def test_a_request_that_someone_else_cancels_ends_with_what_it_has():
    async with (
        FakeServer(UNFINISHED) as server,
        AsyncClient(server.target) as reader,
        AsyncClient(server.target) as other,
    ):
        stream = reader.stream("?", request_id="r1")
        await anext(stream)
        await other.cancel("r1")
        result = await stream.collect()
    assert (result.text, result.finish_reason) == ("a", FinishReason.CANCELLED)


async def test_cancelling_an_unknown_request_says_so():
    async with FakeServer() as server, AsyncClient(server.target) as client:
        with pytest.raises(NotFoundError):
            await client.cancel("unknown")


async def test_closing_the_client_ends_its_streams():
    async with FakeServer(UNFINISHED) as server:
        client = AsyncClient(server.target)
        stream = client.stream("?")
        await anext(stream)
        waiting = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(ClientClosedError):
            await waiting
        with pytest.raises(ClientClosedError):
            await client.generate("?")
        await client.close()


async def test_nothing_is_left_after_closing():
    before = asyncio.all_tasks()
    async with FakeServer(UNFINISHED) as server:
        async with AsyncClient(server.target) as client:
            stream = client.stream("?")
            await anext(stream)
        with pytest.raises(ClientClosedError):
            await anext(stream)
    assert asyncio.all_tasks() == before


async def test_closing_a_stream_ends_the_iteration_of_another_task():
    async with FakeServer(UNFINISHED) as server, AsyncClient(server.target) as client:
        stream = client.stream("?", request_id="r1")

        async def read():
            return [delta.text async for delta in stream]

        await anext(stream)
        reading = asyncio.create_task(read())
        await asyncio.sleep(0)
        await asyncio.gather(stream.aclose(), stream.aclose())
        assert await reading == []
        await server.seen_that(cancelled_is("r1"))
        with pytest.raises(RequestCancelledError, match="r1"):
            _ = stream.result
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_closing_a_stream_that_is_still_connecting_ends_it_too():
    """Before anything was sent there is nothing to cancel, and nobody is left waiting."""
    client = AsyncClient("127.0.0.1:1")
    stream = client.stream("?")
    reading = asyncio.create_task(stream.collect())
    await asyncio.sleep(0.01)
    await stream.aclose()
    with pytest.raises(RequestCancelledError):
        await reading
    await client.close()


async def test_a_stream_that_was_left_has_no_result():
    """However it was left: closed, or by the cancellation of its reader."""
    async with FakeServer(UNFINISHED) as server, AsyncClient(server.target) as client:
        unread, closed, cancelled = client.stream("?"), client.stream("?"), client.stream("?")
        await unread.aclose()
        await anext(closed)
        await closed.aclose()
        await anext(cancelled)
        reading = asyncio.create_task(cancelled.collect())
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        for stream in (unread, closed, cancelled):
            with pytest.raises(RequestCancelledError):
                _ = stream.result


async def test_tasks_that_read_one_stream_share_its_deltas():
    async with FakeServer(say("one two three four")) as server, AsyncClient(server.target) as client:
        stream, came = client.stream("?"), []

        async def read():
            async for delta in stream:
                came.append(delta.text)
                await asyncio.sleep(0)

        await asyncio.gather(read(), read(), read())
        assert came == ["one", " two", " three", " four", ""]
        assert stream.result.text == "one two three four"


async def test_every_reader_of_a_failed_stream_can_ask_why():
    script = [Tokens((1,), "a"), Fail(grpc.StatusCode.INTERNAL, "a bug")]
    async with FakeServer(script) as server, AsyncClient(server.target) as client:
        stream = client.stream("?")
        with pytest.raises(ServerError):
            await stream.collect()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        with pytest.raises(ServerError):
            await stream.collect()


async def test_a_request_that_was_left_is_acknowledged_once_and_after_its_last_completion():
    """Each completion's end comes by itself, and none of them is the request's but the last."""
    script = [Tokens((1,), "a", completion=0), End(completion=0), Hold(), End(completion=1)]
    async with FakeServer(script) as server, AsyncClient(server.target, keepalive=QUICK) as client:
        stream = client.stream("?", sampling=Sampling(n=2), request_id="r1")
        await anext(stream)
        await stream.aclose()
        await server.seen_that(lambda seen: seen.acknowledged)
        await server.seen_that(lambda seen, num=server.seen.num_heartbeats: seen.num_heartbeats > num + 1)
        assert server.seen.acknowledged == ["r1"]

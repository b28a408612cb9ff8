"""Every way of leaving a request tells the server, and leaves nothing behind: no task, no thread, no object."""

import asyncio
import contextlib
import gc
import itertools
import threading
import time
from collections import Counter
from pathlib import Path

import grpc
import pytest

from paceline_client import AsyncClient, Client, FinishReason, Keepalive, Sampling, Timeout, errors
from paceline_client.testing import Break, Die, End, Fail, FakeServer, Hold, Tokens, say

QUICK = Keepalive(heartbeat_seconds=0.02)
NUM_REQUESTS = 40  # in every way
NUM_AT_ONCE = 16
SETTLE_S = 30.0
NUMBERS = itertools.count(100)
UNFINISHED = [Tokens((1,), "a"), Hold()]
# By the beginning of a request's name.
SCRIPTS = {
    "read": [Tokens((1,), "a"), End()],
    "resumed": [Tokens((1,), "a"), Break(), Tokens((2,), "b"), End()],
    "died": [Tokens((1,), "a"), Die(), Tokens((2,), "b"), End()],
    "refused": [Fail(grpc.StatusCode.INVALID_ARGUMENT, "bad", "BAD")],
}


def script_of(request):
    return SCRIPTS.get(request.request_id.partition("-")[0], UNFINISHED)


def cancelled_is(*request_ids):
    """The condition that exactly these were cancelled."""
    return lambda seen: seen.cancelled == list(request_ids)


async def break_out_of_the_loop(client, name):
    """No close is needed: dropping the stream is enough."""
    async for _ in client.stream("?", request_id=name):
        break


async def leave_the_block(client, name):
    async with client.stream("?", request_id=name) as stream:
        await anext(stream)


async def cancel_the_task(client, name):
    stream = client.stream("?", request_id=name)
    await anext(stream)
    task = asyncio.create_task(stream.collect())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def run_out_of_time(client, name):
    with pytest.raises(errors.RequestTimeoutError, match=r"0\.2 s"):
        await client.generate("?", request_id=name, timeout=Timeout(total_seconds=0.2))


LEAVING = {
    "break": break_out_of_the_loop,
    "leave": leave_the_block,
    "cancel": cancel_the_task,
    "late": run_out_of_time,
}


@pytest.mark.parametrize("leave", LEAVING.values(), ids=LEAVING)
async def test_every_way_of_leaving_cancels(leave):
    async with FakeServer(UNFINISHED) as server, AsyncClient(server.target) as client:
        await leave(client, "r1")
        gc.collect()
        await server.seen_that(cancelled_is("r1"))


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


async def test_closing_the_client_ends_its_streams_and_leaves_no_task():
    before = asyncio.all_tasks()
    async with FakeServer(UNFINISHED) as server:
        client = AsyncClient(server.target)
        unread, waiting = client.stream("?"), client.stream("?")
        for stream in (unread, waiting):
            await anext(stream)
        reading = asyncio.create_task(anext(waiting))
        await asyncio.sleep(0)
        await client.close()
        for use in (reading, anext(unread), client.generate("?")):
            with pytest.raises(errors.ClientClosedError):
                await use
        await client.close()
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
        with pytest.raises(errors.RequestCancelledError, match="r1"):
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
    with pytest.raises(errors.RequestCancelledError):
        await reading
    await client.close()


async def test_a_stream_that_was_left_has_no_result():
    """Closed before it was read, or by the cancellation of its reader."""
    async with FakeServer(UNFINISHED) as server, AsyncClient(server.target) as client:
        unread, cancelled = client.stream("?"), client.stream("?")
        await unread.aclose()
        await anext(cancelled)
        reading = asyncio.create_task(cancelled.collect())
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        for stream in (unread, cancelled):
            with pytest.raises(errors.RequestCancelledError):
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
        with pytest.raises(errors.ServerError):
            await stream.collect()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        with pytest.raises(errors.ServerError):
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


# Nothing stays in the client


async def read(client, name):
    await client.generate("?", request_id=name)


async def cancel_before_anything_is_sent(client, name):
    task = asyncio.create_task(client.generate("?", request_id=name))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def be_refused(client, name):
    with contextlib.suppress(errors.PacelineError):
        await client.generate("?", request_id=name)


WAYS = LEAVING | {"read": read, "unsent": cancel_before_anything_is_sent, "refused": be_refused}
BREAKING = {"resumed": read, "died": read}


async def use(client, ways, num_requests, num_at_once=NUM_AT_ONCE):
    """Use a client in these ways, so many times each; each request has a name of its own."""
    numbers = [next(NUMBERS) for _ in range(num_requests)]
    requests = iter([(way, f"{name}-{number}") for number in numbers for name, way in ways.items()])

    async def work():
        for way, request_id in requests:
            await way(client, request_id)

    await asyncio.gather(*(work() for _ in range(num_at_once)))


def objects_of_the_client():
    """How many objects of each of its types there are; what plays the server does not count."""
    gc.collect()
    modules = ((kind.__qualname__, str(kind.__module__)) for kind in map(type, gc.get_objects()))
    return Counter(
        name
        for name, module in modules
        if module.startswith("paceline_client") and not module.startswith("paceline_client.testing")
    )


def num_open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


async def settled(holds):
    """Wait until what ends is over."""
    async with asyncio.timeout(SETTLE_S):
        while not holds():
            await asyncio.sleep(0.1)


async def test_requests_that_are_left_in_every_way_leave_nothing_behind():
    async with FakeServer(script_of) as server, AsyncClient(server.target) as client:
        await use(client, WAYS, 1)
        await asyncio.sleep(0.1)  # more than is left then is what the test looks for
        num_tasks, before = len(asyncio.all_tasks()), objects_of_the_client()
        await use(client, WAYS, NUM_REQUESTS)
        await settled(lambda: len(asyncio.all_tasks()) <= num_tasks and not objects_of_the_client() - before)


async def test_sessions_that_break_leave_nothing_behind():
    """A connection that is just gone or there again counts for less than something that each of them leaves."""
    num_sessions = 10

    def held():
        return objects_of_the_client() + Counter(tasks=len(asyncio.all_tasks()), files=num_open_files())

    async with FakeServer(script_of) as server, AsyncClient(server.target) as client:
        await use(client, BREAKING, 1, num_at_once=1)
        before = held()
        await use(client, BREAKING, num_sessions, num_at_once=1)
        await settled(lambda: max((held() - before).values(), default=0) < num_sessions)


def test_clients_that_are_closed_leave_no_thread_and_no_connection():
    with FakeServer(script_of) as server:

        def use_one(number):
            with Client(server.target) as client:
                client.generate("?", request_id=f"read-{number}")

        use_one(0)
        num_threads, num_files = threading.active_count(), num_open_files()
        for number in range(1, 11):
            use_one(number)
        assert threading.active_count() <= num_threads
        until = time.monotonic() + SETTLE_S
        while num_open_files() > num_files and time.monotonic() < until:
            time.sleep(0.02)
        assert num_open_files() <= num_files

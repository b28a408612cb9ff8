"""However requests are left, nothing of them stays in the client: no task, no thread, no object."""

import asyncio
import contextlib
import gc
import itertools
import threading
import time
from collections import Counter
from pathlib import Path

import grpc

from paceline_client import AsyncClient, Client, PacelineError, Timeout
from paceline_client.testing import Break, Die, End, Fail, FakeServer, Hold, Tokens

NUM_REQUESTS = 40  # in every way
NUM_AT_ONCE = 16
SETTLE_S = 30.0
NUMBERS = itertools.count(100)
UNFINISHED = [Tokens((1,), "a"), Hold()]
SCRIPTS = {
    "read": [Tokens((1,), "a"), End()],
    "resumed": [Tokens((1,), "a"), Break(), Tokens((2,), "b"), End()],
    "died": [Tokens((1,), "a"), Die(), Tokens((2,), "b"), End()],
    "refused": [Fail(grpc.StatusCode.INVALID_ARGUMENT, "bad", "BAD")],
}


def script_of(request):
    """By the beginning of the request's name."""
    return SCRIPTS.get(request.request_id.partition("-")[0], UNFINISHED)


async def read(client, name):
    """To the end."""
    await client.generate("?", request_id=name)


async def leave(client, name):
    """After the first token."""
    async with client.stream("?", request_id=name) as stream:
        await anext(stream)


async def drop(client, name):
    """Left to the garbage collector."""
    await anext(client.stream("?", request_id=name))


async def cancel_the_task(client, name):
    """While it waits."""
    task = asyncio.create_task(client.generate("?", request_id=name))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def run_out_of_time(client, name):
    """The client's own limit."""
    with contextlib.suppress(PacelineError):
        await client.generate("?", request_id=name, timeout=Timeout(total_seconds=0.01))


async def be_refused(client, name):
    """By the server."""
    with contextlib.suppress(PacelineError):
        await client.generate("?", request_id=name)


WAYS = {
    "read": read,
    "leave": leave,
    "drop": drop,
    "cancel": cancel_the_task,
    "late": run_out_of_time,
    "refused": be_refused,
}
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
    """How many descriptors this process has."""
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
    """Nor do their connections: ten of them leave no more than there is at some time after one."""
    num_tasks, num_files, before = 0, 0, Counter()
    async with FakeServer(script_of) as server, AsyncClient(server.target) as client:
        for _ in range(3):  # a connection may just be gone, or there again
            await use(client, BREAKING, 1, num_at_once=1)
            num_tasks, num_files = max(num_tasks, len(asyncio.all_tasks())), max(num_files, num_open_files())
            before |= objects_of_the_client()
        await use(client, BREAKING, 10, num_at_once=1)
        await settled(lambda: len(asyncio.all_tasks()) <= num_tasks and not objects_of_the_client() - before)
        await settled(lambda: num_open_files() <= num_files)


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

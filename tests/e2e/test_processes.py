"""Processes that end and die while requests run."""

import asyncio
import signal

import pytest

from paceline_client import AsyncClient, Sampling, Stopping

# A second real model beside that of the other tests; tests/faults kills processes, too.
pytestmark = pytest.mark.slow

NUM_STREAMS = 16
# Seconds of work for all streams together: what is done to the processes is done while they run.
STOPPING = Stopping(max_tokens=128, ignore_eos=True)


def requests():
    """Greedy and seeded requests, told apart by their prompts."""
    return [
        {
            "prompt": f"Story number {number}: " + "once upon a time " * (number % 5),
            "sampling": Sampling(temperature=0.8 * (number % 2), seed=number),
            "stopping": STOPPING,
        }
        for number in range(NUM_STREAMS)
    ]


async def start(client):
    """Start all requests and return when each has a first token: [(tokens so far, task of the rest)]."""
    streams = [client.stream(**request) for request in requests()]

    async def read(stream, started):
        async for _ in stream:
            started.set()
        return stream.result

    begun = [asyncio.Event() for _ in streams]
    tasks = [asyncio.create_task(read(stream, event)) for stream, event in zip(streams, begun, strict=True)]
    await asyncio.wait_for(asyncio.gather(*(event.wait() for event in begun)), 120)
    return tasks


@pytest.fixture(scope="module")
def undisturbed(own_system):
    """What the requests generate when nothing happens."""

    async def generate():
        async with AsyncClient(own_system.api) as client:
            return await asyncio.gather(*(client.generate(**request) for request in requests()))

    return [result.token_ids for result in asyncio.run(generate())]


async def test_an_executor_that_is_killed_loses_no_request_and_no_token(own_system, undisturbed):
    async with AsyncClient(own_system.api) as client:
        running = await start(client)
        own_system.send("paceline-executor", signal.SIGKILL)
        results = await asyncio.wait_for(asyncio.gather(*running), 240)
    assert [result.token_ids for result in results] == undisturbed
    assert max(result.attempt for result in results) >= 2


async def test_a_scheduler_that_is_killed_loses_no_request_and_no_token(own_system, undisturbed):
    """The next one finds them on the executor, where they have run on: nothing is computed again."""
    async with AsyncClient(own_system.api) as client:
        running = await start(client)
        own_system.send("paceline-scheduler", signal.SIGKILL)
        results = await asyncio.wait_for(asyncio.gather(*running), 240)
    assert [result.token_ids for result in results] == undisturbed
    assert {result.attempt for result in results} == {1}


async def test_a_scheduler_that_is_told_to_stop_finishes_what_it_has(own_system, undisturbed):
    """SIGTERM under load: running requests get all their tokens, a new one waits for the next scheduler."""
    async with AsyncClient(own_system.api) as client:
        running = await start(client)
        own_system.send("paceline-scheduler", signal.SIGTERM)
        await asyncio.sleep(0.5)
        late = asyncio.create_task(client.generate("too late", stopping=STOPPING))
        results = await asyncio.wait_for(asyncio.gather(*running), 240)
        assert (await asyncio.wait_for(late, 120)).token_ids
    assert [result.token_ids for result in results] == undisturbed


async def test_the_scheduler_is_started_again_and_serves(own_system):
    async with AsyncClient(own_system.api) as client:
        await client.wait_until_ready(60)
        assert (await client.generate("Hello", stopping=STOPPING)).token_ids

"""One scheduler dies, freezes or is displaced, and the next one carries on its requests. In virtual time."""

import asyncio
from dataclasses import replace

import numpy as np

from both_sides.audited import expected_output
from both_sides.deployment import Deployment, scenario
from paceline.plan.hashes import HASH_START, rolling_hash
from paceline.plan.values import Approach
from paceline_scheduler.backend import Arrival
from paceline_scheduler.core.events import Resume
from paceline_scheduler.core.request import ResumePoint
from paceline_scheduler.errors import GivenUpError
from paceline_scheduler.testing.requests import make_request

FIRST, SECOND = "executor:1", "executor:2"


def resumable(max_tokens=40):
    """A request that runs for about a second and whose client comes back."""
    return make_request(5, max_tokens, is_resumable=True)


async def move(requests, before, after):
    """The clients of these requests go to another scheduler with all they hold."""
    await after.executors.until_synced(Arrival.BACK)
    for request in requests:
        held = np.array(before.client.token_ids.get(request.handle, []), dtype=np.int32)
        point = ResumePoint(len(held), rolling_hash(HASH_START, held), 1, held)
        (resumed,) = after.runtime.feed(Resume((replace(request, attachment=2, point=point),)))
        if len(held):
            after.client.token_ids[request.handle] = held.tolist()
            after.client.forget_after(request.handle, len(held))
        if resumed.outputs is not None:
            after.client.deliver((resumed.outputs,), ())


async def ended(rig, requests):
    """All have ended, with the tokens of the reference, in their first attempt."""
    await rig.until(lambda: len(rig.client.ended) >= len(requests))
    assert rig.client.failures == {}
    for request in requests:
        assert tuple(rig.client.token_ids[request.handle]) == expected_output(request)
    return {rig.client.attempts[request.handle] for request in requests}


@scenario
async def test_a_successor_carries_on_without_computing_anything_again():
    requests = [resumable() for _ in range(6)]
    async with Deployment(FIRST, SECOND) as deployment:
        async with deployment.rig() as first:
            await first.until_ready(2)
            first.submit(*requests)
            await first.until(lambda: len(first.client.token_ids) == 6)
        async with deployment.rig(scheduler_id="scheduler-b") as second:
            await move(requests, first, second)
            assert await ended(second, requests) == {1}


@scenario
async def test_requests_wait_until_an_executor_that_says_nothing_is_given_up():
    """1.5 s: what it runs is not known before."""
    loop = asyncio.get_running_loop()
    async with Deployment(FIRST, SECOND) as deployment:
        deployment.network.freeze(SECOND)
        started_s = loop.time()
        async with deployment.rig() as rig:
            await rig.executors.until_synced(Arrival.BACK)
            # GetInfo of the frozen one takes its second before anybody attaches.
            assert 1.5 <= loop.time() - started_s <= 3.0
            request = resumable()
            rig.submit(request)
            await ended(rig, [request])


@scenario
async def test_a_dead_executor_holds_nobody_up():
    loop = asyncio.get_running_loop()
    async with Deployment(FIRST, SECOND) as deployment:
        deployment.network.stop(SECOND)
        async with deployment.rig() as rig:
            await rig.executors.until_synced(Arrival.BACK)
            assert loop.time() < 0.5


@scenario
async def test_a_standby_takes_over_and_the_displaced_one_gives_up_all():
    requests = [resumable(60) for _ in range(3)]
    async with Deployment(FIRST, SECOND) as deployment, deployment.rig() as first:
        await first.until_ready(2)
        first.submit(*requests)
        await first.until(lambda: len(first.client.token_ids) == 3)
        async with deployment.rig(scheduler_id="scheduler-b", approach=Approach.TAKE_OVER) as second:
            await second.until_ready(2)
            await first.until(lambda: len(first.client.failures) == 3)
            assert {type(error) for error in first.client.failures.values()} == {GivenUpError}
            await move(requests, first, second)
            assert await ended(second, requests) == {1}


@scenario
async def test_a_request_follows_its_client_when_scheduler_and_executor_die():
    """Only the client knows anything of it: it sends what it has."""
    requests = [resumable()]
    async with Deployment(FIRST) as deployment:
        async with deployment.rig() as first:
            await first.until_ready()
            first.submit(*requests)
            await first.until(lambda: len(first.client.token_ids.get(requests[0].handle, ())) > 5)
        deployment.network.stop(FIRST)
        deployment.network.start(FIRST)
        async with deployment.rig(scheduler_id="scheduler-b") as second:
            await move(requests, first, second)
            assert await ended(second, requests) == {2}


@scenario
async def test_a_standby_that_gets_some_executors_gives_up_one_that_says_nothing():
    async with Deployment(FIRST, SECOND) as deployment, deployment.rig() as first:
        await first.until_ready(2)
        async with deployment.rig(scheduler_id="scheduler-b") as second:
            await asyncio.sleep(1.0)
            deployment.network.freeze(SECOND)
            await first.stop()
            await second.until_ready(1)
            await second.executors.until_synced(Arrival.BACK)
            request = resumable()
            second.submit(request)
            await ended(second, [request])


@scenario
async def test_an_executor_that_another_scheduler_has_taken_gives_its_requests_back():
    requests = [resumable(60) for _ in range(4)]
    async with Deployment(FIRST, SECOND) as deployment, deployment.rig() as first:
        await first.until_ready(2)
        first.submit(*requests)
        await first.until(lambda: len(first.client.token_ids) == 4)
        deployment.network.stop(SECOND)
        deployment.network.start(SECOND)
        await deployment.stranger(SECOND, "scheduler-0", 1)
        await ended(first, requests)

"""One scheduler dies, freezes or is displaced, and the next one carries on its requests. In virtual time."""

import asyncio

import pytest

from both_sides.audited import expected_output
from both_sides.deployment import Deployment, come_over, scenario
from paceline.plan.values import Approach, Claim
from paceline_scheduler.backend import Arrival
from paceline_scheduler.errors import GivenUpError, StandbyError
from paceline_scheduler.link.leadership import ServingStatus
from paceline_scheduler.testing.requests import make_request

FIRST, SECOND = "executor:1", "executor:2"


def resumable(max_tokens=40):
    """A request that runs for about a second and whose client comes back."""
    return make_request(5, max_tokens, is_resumable=True)


async def ended(rig, requests):
    """All have ended, with the tokens of the reference, in their first attempt."""
    await rig.until(lambda: len(rig.client.ended) >= len(requests))
    assert rig.client.failures == {}
    for request in requests:
        assert tuple(rig.client.token_ids[request.handle]) == expected_output(request)
    return {rig.client.attempts[request.handle] for request in requests}


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
async def test_a_displaced_scheduler_gives_up_all_its_requests_which_go_on_where_it_says():
    """And is in line again at once."""
    requests = [resumable(60) for _ in range(3)]
    async with Deployment(FIRST, SECOND) as deployment, deployment.rig() as old:
        await old.until_ready(2)
        old.submit(*requests)
        await old.until(lambda: len(old.client.token_ids) == 3)
        async with deployment.rig(scheduler_id="scheduler-b", approach=Approach.TAKE_OVER) as new:
            await old.until(lambda: len(old.client.failures) == 3)
            taken_by = Claim(new.leadership.claim.term, "scheduler-b", "scheduler-b:50051")
            assert {type(error) for error in old.client.failures.values()} == {GivenUpError}
            assert {error.active for error in old.client.failures.values()} == {taken_by}
            with pytest.raises(StandbyError) as refusal:
                await old.executors.until_synced(Arrival.NEW)
            assert refusal.value.active == taken_by
            assert ServingStatus.NOT_SERVING not in old.statuses
            await new.until_ready(2)
            await asyncio.sleep(0.4)
            assert [deployment[address].fence.num_waiting for address in (FIRST, SECOND)] == [1, 1]
            await come_over(requests, old, new)
            assert await ended(new, requests) == {1}
        left_s = asyncio.get_running_loop().time()
        await old.until_ready(2)
        assert asyncio.get_running_loop().time() - left_s < 0.2


@scenario
async def test_a_standby_that_gets_some_executors_gives_up_one_that_says_nothing():
    """New requests wait until then: nobody sends them to the scheduler that has died."""
    async with Deployment(FIRST, SECOND) as deployment, deployment.rig() as first:
        await first.until_ready(2)
        async with deployment.rig(scheduler_id="scheduler-b") as second:
            await asyncio.sleep(1.0)
            deployment.network.freeze(SECOND)
            await first.stop()
            await second.until_ready(1)
            waiting = asyncio.create_task(second.executors.until_synced(Arrival.NEW))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            await waiting
            assert second.leadership.claim.term > first.leadership.claim.term
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

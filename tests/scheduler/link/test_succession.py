"""One scheduler dies, freezes or is displaced, and the next one carries on its requests. In virtual time."""

import asyncio
import contextlib

import pytest

from both_sides.deployment import Deployment, assert_whole, come_over, scenario
from paceline.plan.values import Approach, Claim
from paceline_scheduler import process
from paceline_scheduler.backend import Arrival
from paceline_scheduler.errors import GivenUpError, StandbyError
from paceline_scheduler.link.leadership import ServingStatus
from scheduler_rig.requests import make_request
from virtual_time import now

FIRST, SECOND = "executor:1", "executor:2"
LONG = 200  # tokens: more than are computed before anybody gives up here
SHUTDOWN_TIMEOUT_S = 600.0


def resumable(max_tokens=40):
    """A request that runs for about a second and whose client comes back."""
    return make_request(5, max_tokens, is_resumable=True)


async def ended(rig, requests):
    """All have ended, with the tokens of the reference, in their first attempt."""
    await rig.until(lambda: len(rig.client.ended) >= len(requests))
    assert rig.client.failures == {}
    assert_whole(rig, *requests)
    return {rig.client.attempts[request.handle] for request in requests}


@scenario
async def test_requests_wait_until_an_executor_that_says_nothing_is_given_up():
    """1.5 s: what it runs is not known before."""
    async with Deployment(FIRST, SECOND) as deployment:
        deployment.network.freeze(SECOND)
        started_s = now()
        async with deployment.rig() as rig:
            await rig.executors.until_synced(Arrival.BACK)
            # GetInfo of the frozen one takes its second before anybody attaches.
            assert 1.5 <= now() - started_s <= 3.0
            request = resumable()
            rig.submit(request)
            await ended(rig, [request])


@scenario
async def test_a_dead_executor_holds_nobody_up():
    async with Deployment(FIRST, SECOND) as deployment:
        deployment.network.stop(SECOND)
        async with deployment.rig() as rig:
            await rig.executors.until_synced(Arrival.BACK)
            assert now() < 0.5


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
        left_s = now()
        await old.until_ready(2)
        assert now() - left_s < 0.2


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


@scenario
async def test_a_term_that_rises_rises_everywhere():
    """An executor that nobody could reach at the start has a higher term of a scheduler long gone: requests go on."""
    async with Deployment(FIRST, SECOND) as deployment:
        stream = await deployment.stranger(SECOND, "scheduler-z", 7)
        stream.cancel()
        deployment.network.freeze(SECOND)
        async with deployment.rig() as rig:
            await rig.until_ready(1)
            deployment[FIRST].time_scale = 20
            request = make_request(5, 200)
            rig.submit(request)
            await rig.until(lambda: len(rig.client.token_ids.get(request.handle, ())) > 5)
            deployment.network.start(SECOND)
            await rig.until_ready(2)
            assert {deployment[address].fence.holder.term for address in (FIRST, SECOND)} == {8}
            await rig.until(lambda: request.handle in rig.client.ended)
            assert_whole(rig, request)
            assert rig.client.attempts[request.handle] == 1


# A scheduler that is told to stop leaves its executors to one that is queued


class CallsOf:
    """An edge whose calls end when nothing of a scheduler runs any more."""

    def __init__(self, rig):
        self._rig = rig

    def drain(self, *_):
        """Nobody needs to be told."""

    async def drained(self):
        """Wait until each request has ended or was given up."""
        client = self._rig.client
        num = len(client.token_ids)
        await self._rig.until(lambda: len(client.ended) + len(client.failures) >= num)


def drain(rig):
    """Tell a scheduler to stop, as its process does."""
    never = asyncio.get_running_loop().create_future()
    edge = CallsOf(rig)
    return asyncio.create_task(
        process._drain(
            rig.runtime, rig.listener, edge, rig.fleet, (rig._task, never), SHUTDOWN_TIMEOUT_S, asyncio.Event()
        )
    )


@contextlib.asynccontextmanager
async def serving_with_standby(requests):
    """Two executors, a scheduler that runs requests on them, and one in the queue."""
    async with (
        Deployment(FIRST, SECOND, num_blocks=512) as deployment,
        deployment.rig() as active,
        deployment.rig(scheduler_id="scheduler-b") as standby,
    ):
        await active.until_ready(2)
        await active.until(lambda: all(deployment[address].fence.num_waiting for address in (FIRST, SECOND)))
        active.submit(*requests)
        await active.until(lambda: all(active.client.token_ids.get(request.handle) for request in requests))
        yield active, standby


@scenario
async def test_resumable_requests_go_on_at_the_standby_at_once():
    requests = [make_request(5, LONG, is_resumable=True) for _ in range(4)]
    async with serving_with_standby(requests) as (active, standby):
        began_s = now()
        stopping = drain(active)
        await active.until(lambda: len(active.client.failures) == len(requests))
        assert {type(error) for error in active.client.failures.values()} == {GivenUpError}
        await come_over(requests, active, standby)
        new = make_request(5, 3)
        standby.submit(new)
        await standby.until(lambda: new.handle in standby.client.ended)
        assert now() - began_s < 1.0
        assert await stopping, "nothing was lost by it"
        await standby.until(lambda: len(standby.client.ended) == len(requests) + 1)
        for request in requests:
            assert_whole(standby, request)
            assert standby.client.attempts[request.handle] == 1


@scenario
async def test_a_request_whose_client_does_not_come_back_is_finished_first():
    """The resumable ones run on meanwhile: nobody else could run them."""
    plain, other = make_request(5, 60), make_request(5, LONG, is_resumable=True)
    async with serving_with_standby([plain, other]) as (active, _):
        stopping = drain(active)
        await active.until(lambda: plain.handle in active.client.ended)
        assert other.handle not in active.client.failures
        assert await stopping
        assert_whole(active, plain)
        assert list(active.client.failures) == [other.handle]


@scenario
async def test_without_a_standby_what_runs_is_finished():
    """However resumable it is: there is nowhere to go."""
    request = make_request(5, LONG, is_resumable=True)
    async with Deployment(FIRST) as deployment, deployment.rig() as active:
        await active.until_ready()
        active.submit(request)
        await active.until(lambda: bool(active.client.token_ids.get(request.handle)))
        assert await drain(active)
        assert active.client.failures == {}
        assert_whole(active, request)

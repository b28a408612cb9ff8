"""A scheduler that is told to stop leaves its executors to one that is queued. In virtual time."""

import asyncio
import contextlib

from both_sides.audited import expected_output
from both_sides.deployment import Deployment, come_over, scenario
from paceline_scheduler import process
from paceline_scheduler.errors import GivenUpError
from paceline_scheduler.testing.requests import make_request

FIRST, SECOND = "executor:1", "executor:2"
LONG = 200  # tokens: more than are computed before anybody gives up here
SHUTDOWN_TIMEOUT_S = 600.0


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
        began_s = asyncio.get_running_loop().time()
        stopping = drain(active)
        await active.until(lambda: len(active.client.failures) == len(requests))
        assert {type(error) for error in active.client.failures.values()} == {GivenUpError}
        await come_over(requests, active, standby)
        new = make_request(5, 3)
        standby.submit(new)
        await standby.until(lambda: new.handle in standby.client.ended)
        assert asyncio.get_running_loop().time() - began_s < 1.0
        assert await stopping, "nothing was lost by it"
        await standby.until(lambda: len(standby.client.ended) == len(requests) + 1)
        for request in requests:
            assert tuple(standby.client.token_ids[request.handle]) == expected_output(request)
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
        assert tuple(active.client.token_ids[plain.handle]) == expected_output(plain)
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
        assert tuple(active.client.token_ids[request.handle]) == expected_output(request)

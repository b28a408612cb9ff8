"""A scheduler that is queued knows who serves, says so, and has what it needs to take over. In virtual time."""

import asyncio
import contextlib

import pytest
from structlog.testing import capture_logs

from both_sides.deployment import Deployment, scenario
from paceline.plan.values import Claim, Heartbeat
from paceline_scheduler.backend import Arrival
from paceline_scheduler.errors import StandbyError
from paceline_scheduler.link.leadership import Readiness, ServingStatus
from paceline_scheduler.link.linked_executor import ShownState
from paceline_scheduler.serving.announcer import Announcer
from virtual_time import now

FIRST, SECOND = "executor:1", "executor:2"
ACTIVE = Claim(1, "scheduler-a", "scheduler-a:50051")


@contextlib.asynccontextmanager
async def active_and_standby(*addresses):
    """A scheduler that drives these executors, and one that is queued at each."""
    async with (
        Deployment(*addresses) as deployment,
        deployment.rig() as active,
        deployment.rig(scheduler_id="scheduler-b") as standby,
    ):
        await active.until_ready(len(addresses))
        await active.until(lambda: all(deployment[address].fence.num_waiting == 1 for address in addresses))
        yield deployment, active, standby


async def refusal_of(rig, arrival):
    """How long it takes until a request is refused, and by what."""
    started_s = now()
    with pytest.raises(StandbyError) as refusal:
        await rig.executors.until_synced(arrival)
    return now() - started_s, refusal.value


@scenario
async def test_a_new_request_is_sent_to_the_active_scheduler_at_once():
    async with active_and_standby(FIRST, SECOND) as (_, _, standby):
        seconds, refusal = await refusal_of(standby, Arrival.NEW)
        assert (seconds, refusal.active) == (0, ACTIVE)
        assert str(refusal) == "this scheduler stands by; scheduler-a:50051 serves (term 1)"
        assert refusal.retry_after_s <= 0.2


@scenario
async def test_a_request_that_was_begun_is_sent_there_when_its_holder_surely_lives():
    """1.5 s are longer than a dead holder is named."""
    async with active_and_standby(FIRST) as (_, active, standby):
        seconds, refusal = await refusal_of(standby, Arrival.BACK)
        assert (seconds, refusal.active) == (pytest.approx(1.5), ACTIVE)
        assert (active.states(), standby.states()) == ({FIRST: ShownState.READY}, {FIRST: ShownState.CONNECTING})


@scenario
async def test_a_request_that_was_begun_waits_for_the_lease_of_a_holder_that_has_died():
    """50 ms at an executor whose stream has ended, and nothing on top of it."""
    async with active_and_standby(FIRST, SECOND) as (_, active, standby):
        waiting = asyncio.create_task(standby.executors.until_synced(Arrival.BACK))
        await asyncio.sleep(0.01)
        await active.stop()
        died_s = now()
        await waiting
        assert now() - died_s == pytest.approx(0.05, abs=0.02)


@scenario
async def test_a_standby_has_the_tokenizer_before_it_takes_over():
    """Fetching and reading one takes longer than a client should wait."""
    async with active_and_standby(FIRST) as (deployment, active, standby):
        assert deployment.network.num_tokenizer_calls == 2
        await active.stop()
        await standby.until_ready()
        assert deployment.network.num_tokenizer_calls == 2


@scenario
async def test_a_standby_tells_whom_it_stands_behind_and_when_it_takes_over():
    """Once for each holder, for health checks, the log and operators."""
    async with active_and_standby(FIRST) as (deployment, active, standby):
        told = []
        standby.executors.on_readiness(told.append)
        assert standby.executors.readiness == Readiness(ServingStatus.STANDBY, ACTIVE)
        assert [status.holder for status in standby.executors.statuses()] == [ACTIVE]
        third = await deployment.stranger(FIRST, "scheduler-c", 2, takes_over=True, address="c:1")
        await standby.until(lambda: bool(told))
        await active.stop()
        third.cancel()
        await standby.until_ready()
        assert told == [
            Readiness(ServingStatus.STANDBY, Claim(2, "scheduler-c", "c:1")),
            Readiness(ServingStatus.SERVING),
        ]
        assert [status.holder for status in standby.executors.statuses()] == [None]


@scenario
async def test_a_standby_tells_no_trouble_that_is_over():
    async with active_and_standby(FIRST) as (deployment, _, standby):
        await restart(deployment, FIRST, 0.2)
        await standby.until(lambda: standby.executors.statuses()[0].last_error)
        await standby.until(lambda: standby.executors.statuses()[0].holder)
        assert [status.last_error for status in standby.executors.statuses()] == [""]


@scenario
async def test_a_scheduler_that_had_given_an_executor_up_stands_by_all_the_same():
    async with Deployment(FIRST) as deployment:
        deployment.network.freeze(FIRST)
        async with deployment.rig() as active:
            await asyncio.sleep(5)
            async with deployment.rig(scheduler_id="scheduler-b") as standby:
                await asyncio.sleep(5)
                deployment.network.start(FIRST)
                await active.until(lambda: ServingStatus.STANDBY in (*active.statuses, *standby.statuses))


def stands_in_line(deployment, *addresses):
    """Whether somebody does at each of these executors."""
    return all(deployment[address].fence.num_waiting == 1 for address in addresses)


async def restart(deployment, address, seconds):
    """Let an executor be away for so long, and return as another process."""
    deployment.network.stop(address)
    await asyncio.sleep(seconds)
    deployment.network.start(address)


async def restart_under(active, deployment, *addresses):
    """Let the first executor be away for long and short, and see that it returns to the scheduler that had it."""
    for seconds in (0.05, 0.2, 0.4, 0.8, 3.0):
        await restart(deployment, FIRST, seconds)
        await active.until(lambda: stands_in_line(deployment, *addresses))
        assert {deployment[each].holder_scheduler_id for each in addresses} == {"scheduler-a"}


@scenario
async def test_an_executor_that_returns_goes_to_the_scheduler_that_had_it():
    """Its fence takes whoever comes first, and the standby has the higher claim: it would be given all of them."""
    async with active_and_standby(FIRST, SECOND) as (deployment, active, _):
        await restart_under(active, deployment, FIRST, SECOND)
        assert ServingStatus.STANDBY not in active.statuses


@scenario
async def test_the_only_executor_goes_to_the_scheduler_that_had_it_as_well():
    """Nobody knows then whether that scheduler lives; it is given the time that it needs if it does."""
    async with active_and_standby(FIRST) as (deployment, active, standby):
        await restart_under(active, deployment, FIRST)
        await asyncio.gather(active.stop(), restart(deployment, FIRST, 0.2))
        returned_s = now()
        await standby.until_ready()
        assert now() - returned_s < 3.0


@scenario
async def test_a_standby_is_as_quick_after_many_restarts_of_an_executor():
    async with active_and_standby(FIRST) as (deployment, active, standby):
        for _ in range(8):
            await restart(deployment, FIRST, 0.3)
            await active.until(lambda: stands_in_line(deployment, FIRST))
        deployment.network.stop(FIRST)
        deployment.network.start(FIRST)
        returned_s = now()
        await standby.until(lambda: stands_in_line(deployment, FIRST))
        assert now() - returned_s < 1.0


async def keep_alive(stream):
    """Be a scheduler that drives an executor and has nothing to do."""
    while True:
        await stream.write(Heartbeat())
        await asyncio.sleep(0.2)


@scenario
async def test_a_standby_that_gets_some_executors_from_a_scheduler_that_lives_still_stands_by():
    async with Deployment(FIRST, SECOND) as deployment:
        first, second = [await deployment.stranger(each, "scheduler-0", 1, address="a:1") for each in (FIRST, SECOND)]
        alive = [asyncio.create_task(keep_alive(first))]
        alive.append(asyncio.create_task(keep_alive(second)))
        async with deployment.rig(scheduler_id="scheduler-b") as standby:
            await standby.until(lambda: stands_in_line(deployment, FIRST, SECOND))
            alive[0].cancel()
            first.cancel()
            await standby.until_ready(1)
            await asyncio.sleep(2)
            assert standby.executors.readiness == Readiness(ServingStatus.STANDBY, Claim(1, "scheduler-0", "a:1"))
            seconds, refusal = await refusal_of(standby, Arrival.NEW)
            assert (seconds, refusal.active.address) == (0, "a:1")
            alive[1].cancel()
            second.cancel()
            await standby.until_ready(2)
            assert standby.executors.readiness == Readiness(ServingStatus.SERVING)


def test_each_time_a_scheduler_comes_to_stand_by_it_says_that_it_is_ready():
    """Once displaced it is as ready as from the start: whoever watches it learns what it is now."""
    both = frozenset({ServingStatus.SERVING, ServingStatus.STANDBY})
    announcer = Announcer(both, lambda _: None, lambda: ["m"], lambda: False, {})
    with capture_logs() as logged:
        for readiness in (
            Readiness(ServingStatus.SERVING),
            Readiness(ServingStatus.STANDBY, ACTIVE),
            Readiness(ServingStatus.STANDBY, Claim(3, "c", "c:1")),
            Readiness(ServingStatus.SERVING),
        ):
            announcer.changed(readiness)
    told = [(event["event"], event.get("standby", False)) for event in logged]
    standing_by = ("standing_by", False)
    assert told == [("ready", False), standing_by, ("ready", True), standing_by, ("ready", False)]

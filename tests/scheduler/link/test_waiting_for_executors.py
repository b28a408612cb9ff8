"""What the log says while an executor cannot be reached: no warning at a normal start. In virtual time."""

import asyncio

from structlog.testing import capture_logs

from both_sides.deployment import Deployment, scenario
from paceline_scheduler.errors import StillLoadingError

FIRST = "executor:1"


def told(events):
    """The level and name of each event about an executor that is not there."""
    names = ("waiting_for_executor", "executor_unreachable", "executor_detached")
    return [(event["log_level"], event["event"]) for event in events if event["event"] in names]


@scenario
async def test_an_executor_that_starts_a_few_seconds_later_is_waited_for_without_a_warning():
    async with Deployment(FIRST) as deployment:
        deployment.network.stop(FIRST)
        with capture_logs() as events:
            async with deployment.rig() as rig:
                await asyncio.sleep(8)
                deployment.network.start(FIRST)
                await rig.until_ready()
    assert set(told(events)) == {("info", "waiting_for_executor")}


@scenario
async def test_an_executor_that_does_not_come_is_warned_of_within_some_seconds_and_then_now_and_then():
    async with Deployment(FIRST) as deployment:
        deployment.network.stop(FIRST)
        with capture_logs() as events:
            async with deployment.rig():
                await asyncio.sleep(9.9)
                assert ("warning", "executor_unreachable") not in told(events)
                await asyncio.sleep(5)
                assert told(events).count(("warning", "executor_unreachable")) == 1
                await asyncio.sleep(30)
                assert told(events).count(("warning", "executor_unreachable")) <= 4


@scenario
async def test_an_executor_that_loads_its_model_is_waited_for_however_long_that_takes():
    """It says so itself: the first start of a large model is no trouble."""
    async with Deployment(FIRST) as deployment:
        reach = deployment.network.reach

        async def loading(*_):
            raise StillLoadingError("UNAVAILABLE: the model is still loading; wait")

        deployment.network.reach = loading
        with capture_logs() as events:
            async with deployment.rig() as rig:
                await asyncio.sleep(100)
                deployment.network.reach = reach
                await rig.until_ready()
    assert set(told(events)) == {("info", "waiting_for_executor")}


@scenario
async def test_an_executor_that_was_attached_and_goes_is_warned_of_at_once():
    async with Deployment(FIRST) as deployment, deployment.rig() as rig:
        await rig.until_ready()
        with capture_logs() as events:
            deployment.network.stop(FIRST)
            await asyncio.sleep(1)
    assert told(events)[:2] == [("warning", "executor_detached"), ("warning", "executor_unreachable")]

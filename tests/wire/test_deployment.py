"""Executors that tests serve in virtual time notice what a scheduler may not do."""

import pytest

from both_sides.deployment import Deployment, scenario
from paceline.plan.values import BatchPlan
from paceline_scheduler.errors import StreamEndedError, UnreachableError
from paceline_scheduler.testing.requests import column, make_request

FIRST = "executor:1"


async def send_plan_of(stranger, epoch):
    """Let a scheduler that was accepted send a plan that runs nothing, and read what it is told."""
    await stranger.write(BatchPlan(1000, epoch, 1, column(), column(), 0))
    while True:
        await stranger.read()


def test_a_plan_that_breaks_a_rule_fails_the_test_in_the_end():
    """It names an epoch that never was; the stream ends, and so does a test that looks away."""

    @scenario
    async def careless():
        async with Deployment(FIRST) as deployment:
            stranger = await deployment.stranger(FIRST, "careless", 1)
            with pytest.raises(StreamEndedError, match="epoch 7"):
                await send_plan_of(stranger, 7)

    with pytest.raises(AssertionError, match="rules of the plan protocol were broken"):
        careless()


@scenario
async def test_who_dies_is_not_there_until_it_is_started_again():
    async with Deployment(FIRST) as deployment, deployment.rig() as rig:
        await rig.until_ready()
        rig.submit(make_request(3, 200))
        await rig.until(lambda: bool(deployment[FIRST].rows))
        deployment.network.stop(FIRST)
        with pytest.raises(UnreachableError):
            await deployment.network.connect(FIRST).get_info(1.0)
        deployment.network.start(FIRST)
        info = await deployment.network.connect(FIRST).get_info(1.0)
        assert (info.incarnation, deployment[FIRST].rows, deployment[FIRST].num_steps) == (1001, {}, 0)

"""What tests of the core and of links drive: a rule of the plan protocol that is broken there is a loud error."""

from dataclasses import replace

import pytest

from both_sides.audited import make_executor
from both_sides.deployment import Deployment, scenario
from executor_rig.plans import placement, plan
from paceline.plan.values import BatchPlan
from paceline_scheduler.errors import StreamEndedError

KEY = bytes(range(16))


@pytest.fixture
def executor():
    """One with a request on row 0, in blocks 10 and 11 of 4 slots, which has a token."""
    executor = make_executor()
    executor.attach("x")
    prompt = placement(0, (1, 2, 3, 4, 5), max_tokens=8)
    executor.execute(plan([(0, 5)], place=[prompt], grants=[(0, 0, 10), (0, 1, 11)]))
    return executor


@pytest.mark.parametrize("change", [{"epoch": 7}, {"incarnation": 7}, {"step_id": 9}])
def test_a_plan_of_another_epoch_or_a_gap_is_refused(executor, change):
    with pytest.raises(AssertionError, match="not the plan"):
        executor.receive(replace(plan(step_id=2), **change))


def test_no_more_plans_are_in_flight_than_the_executor_takes(executor):
    for step_id in range(2, 6):
        executor.receive(plan(step_id=step_id))
    with pytest.raises(AssertionError, match="more plans in flight"):
        executor.receive(plan(step_id=6))


def test_what_a_scheduler_may_not_send_is_loud_when_it_arrives(executor):
    """Although the executor itself would run it."""
    with pytest.raises(AssertionError, match="tag of a block before the result that filled it"):
        executor.receive(plan(step_id=2, tags=[(11, KEY)]))


def test_what_a_scheduler_may_not_send_is_loud_when_it_runs(executor):
    executor.execute(plan(step_id=2, preempt=[0]))
    with pytest.raises(AssertionError, match="tag of a released block"):
        executor.execute(plan(step_id=3, tags=[(10, KEY)]))


def test_what_the_executor_refuses_is_loud(executor):
    with pytest.raises(AssertionError, match="beyond its known tokens"):
        executor.execute(plan([(0, 2)], step_id=2))


async def read_to_the_end(stream):
    while True:
        await stream.read()


def test_a_rule_that_is_broken_on_a_stream_fails_the_test_in_the_end():
    """It names an epoch that never was; the stream ends, and so does a test that looks away."""

    @scenario
    async def careless():
        async with Deployment("executor:1") as deployment:
            stranger = await deployment.stranger("executor:1", "careless", 1)
            await stranger.write(BatchPlan(1000, 7, 1))
            with pytest.raises(StreamEndedError, match="epoch 7"):
                await read_to_the_end(stranger)

    with pytest.raises(AssertionError, match="rules of the plan protocol were broken"):
        careless()

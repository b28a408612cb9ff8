"""A simulated executor changes its driver as the protocol says: in virtual time, with streams and no network."""

import asyncio

import pytest

from paceline.plan.values import BatchPlan, BlockGrants, ProtocolRange, StepResult
from paceline_scheduler.simulator.fence import Approach
from paceline_scheduler.simulator.service import (
    Accepted,
    Beat,
    Draining,
    Ended,
    InLine,
    SimulatedService,
    StreamEnd,
)
from paceline_scheduler.testing.requests import column, make_executor, make_placement, make_request
from paceline_scheduler.testing.virtual_time import run_in_virtual_time


class Stage:
    """An executor whose steps take 1 s, and a clock that can jump."""

    def __init__(self, **options):
        self._loop = asyncio.get_running_loop()
        self.standstill_s = 0.0
        self.service = SimulatedService(make_executor(), self.now_s, time_scale=1000.0, **options)
        self.tasks = [self._loop.create_task(self.service.run_steps())]

    def now_s(self):
        """The executor's clock."""
        return self._loop.time() + self.standstill_s

    def speak(self, *streams):
        """Let schedulers send heartbeats from now on."""

        async def beat():
            while True:
                for stream in streams:
                    self.service.hear(stream, None)
                await asyncio.sleep(0.2)

        self.tasks.append(self._loop.create_task(beat()))
        return self.tasks[-1]

    async def driven(self):
        """A stream that drives, with a request on row 0."""
        stream = self.service.hello("driver", 5)
        await until(stream, Accepted)
        request = make_request(4, 8)
        placement = make_placement(0, request, max_tokens=8)
        grants = BlockGrants(column(0, 0), column(0, 1), column(10, 11))
        self.plan(stream, 1, num_tokens=4, new_requests=(placement,), grants=grants)
        await until(stream, StepResult)
        return stream

    def plan(self, stream, step_id, num_tokens=1, predicted_ns=0, **contents):
        """Send a plan that runs row 0."""
        epoch = self.service.executor.epoch
        plan = BatchPlan(1, epoch, step_id, column(0), column(num_tokens), predicted_ns, **contents)
        self.service.hear(stream, plan)


async def until(stream, kind):
    """The first message of this kind; what comes before it is dropped."""
    while not isinstance(message := await stream.outbox.get(), kind):
        pass
    return message


def staged(main):
    """Run a test on a stage, in virtual time."""

    async def run():
        stage = Stage()
        await asyncio.wait_for(main(stage), 60)
        assert stage.service.violations == []
        for task in stage.tasks:
            task.cancel()

    def test():
        run_in_virtual_time(run())

    test.__name__, test.__doc__ = main.__name__, main.__doc__
    return test


@staged
async def test_a_takeover_drops_queued_plans_and_waits_for_the_running_step(stage):
    """Its result reaches nobody: it is in the snapshot. The old stream ends before that."""
    old = await stage.driven()
    stage.plan(old, 2)
    stage.plan(old, 3)
    start_s = stage.now_s()
    await asyncio.sleep(0.5)
    new = stage.service.hello("other", 6, Approach.TAKE_OVER)
    assert (await until(old, Ended)).end is StreamEnd.REPLACED
    assert stage.now_s() - start_s == pytest.approx(0.5)

    (row,) = (await until(new, Accepted)).snapshot.rows
    assert row.num_computed_tokens == 5
    assert stage.now_s() - start_s == pytest.approx(1.0)
    stage.plan(new, 1)
    assert (await until(new, StepResult)).epoch == 2
    assert old.outbox.empty()


@staged
async def test_a_stream_that_breaks_takes_its_queued_plans_with_it(stage):
    """Whoever comes next finds the step that ran, and no other."""
    old = await stage.driven()
    stage.plan(old, 2)
    stage.plan(old, 3)
    await asyncio.sleep(0.5)
    stage.service.break_stream()
    await asyncio.sleep(5)

    (row,) = (await until(stage.service.hello("other", 6), Accepted)).snapshot.rows
    assert row.num_computed_tokens == 5


@staged
async def test_one_in_line_gets_the_executor_when_the_holder_is_gone_or_silent(stage):
    """50 ms after the end of its stream, or 1 s after its last word."""
    first = stage.service.hello("first", 5)
    second, third = stage.service.hello("second", 6), stage.service.hello("third", 7)
    stage.speak(third)
    speaking = stage.speak(first, second)
    assert isinstance(await second.outbox.get(), InLine)
    await asyncio.sleep(0.5)
    start_s = stage.now_s()
    stage.service.leave(first)
    await until(third, Accepted)
    assert 0.05 <= stage.now_s() - start_s <= 0.06
    assert (await until(second, Ended)).end is StreamEnd.SUPERSEDED

    speaking.cancel()
    fourth = stage.service.hello("fourth", 8)
    stage.tasks[1].cancel()
    start_s = stage.now_s()
    stage.speak(fourth)
    await until(fourth, Accepted)
    assert 0.8 <= stage.now_s() - start_s <= 1.01


@staged
async def test_the_holder_that_returns_at_once_goes_first(stage):
    """The one in line waits on."""
    first, second = stage.service.hello("first", 5), stage.service.hello("second", 6)
    stage.speak(second)
    stage.service.leave(first)
    await asyncio.sleep(0.04)
    again = stage.service.hello("first", 5)
    stage.speak(again)
    await until(again, Accepted)
    await asyncio.sleep(5)

    assert (stage.service.holder_scheduler_id, stage.service.fence.num_waiting) == ("first", 1)


@staged
async def test_a_standstill_of_the_executor_is_nobodys_silence(stage):
    """Whoever is heard first afterwards."""
    stage.service.hello("first", 5)
    second = stage.service.hello("second", 6)
    await asyncio.sleep(0.1)
    stage.standstill_s += 60
    stage.service.hear(second, None)

    assert stage.service.holder_scheduler_id == "first"


@staged
async def test_heartbeats_come_every_200_ms_and_name_the_running_step(stage):
    """So that a long step is told from a dead executor."""
    stream = await stage.driven()
    while not stream.outbox.empty():
        stream.outbox.get_nowait()
    stage.plan(stream, 2)
    beats = [await until(stream, Beat) for _ in range(3)]

    assert [beat.running_step_id for beat in beats] == [2, 2, 2]
    assert beats[2].running_ns - beats[0].running_ns == 400_000_000


@staged
async def test_an_executor_stuck_in_a_step_refuses_whoever_comes(stage):
    """There is no boundary to begin at; later there is."""
    old = await stage.driven()
    stage.service.time_scale = 5000.0
    stage.plan(old, 2)
    await asyncio.sleep(0.1)
    refused = stage.service.hello("other", 6, Approach.TAKE_OVER)
    ended = await until(refused, Ended)
    await asyncio.sleep(5)

    assert ended.end is StreamEnd.WEDGED
    assert isinstance(await until(stage.service.hello("other", 6), Accepted), Accepted)


@staged
async def test_no_version_in_common_ends_the_stream_with_a_sentence(stage):
    """It never stood in line, and its term counts for nothing."""
    stage.service.protocols = ProtocolRange(2, 3)
    stream = stage.service.hello("old", 9, protocols=ProtocolRange(1, 1))
    ended = await until(stream, Ended)

    assert ended.end is StreamEnd.PROTOCOL
    assert ended.detail == "the executor speaks protocol 2 to 3, the scheduler 1 to 1; upgrade the scheduler"
    assert stage.service.highest_term == 0
    accepted = await until(stage.service.hello("new", 1, protocols=ProtocolRange(1, 2)), Accepted)
    assert accepted.protocol == 2


@staged
async def test_a_drain_is_told_to_those_who_come_later_too_and_a_restart_forgets_it(stage):
    """The fence is forgotten as well: any term will do."""
    stage.service.drain("going away")
    late = stage.service.hello("late", 5)
    assert (await until(late, Draining)).reason == "going away"
    stage.service.restart()
    assert (await until(late, Ended)).end is StreamEnd.BROKEN
    fresh = stage.service.hello("fresh", 1)
    await until(fresh, Accepted)

    assert fresh.outbox.empty()

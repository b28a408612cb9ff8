"""When a plan stream is given up: silence, a stuck step, messages out of turn; and when nobody is to blame. Virtual."""

import asyncio
from dataclasses import replace

import pytest

from both_sides.audited import make_executor
from paceline.plan import values
from paceline.plan.versions import ProtocolRange
from paceline_scheduler.errors import DivergenceError, LinkError, StreamEndedError
from paceline_scheduler.link.plan_stream import PlanStream, StepCallbacks
from scheduler_rig.requests import column
from virtual_time import in_virtual_time, now

MODEL = values.Model("simulated", "simulated", 256, 300)
HELLO = values.Hello(values.Claim(1, "scheduler"))


class ScriptedExecutor:
    """The executor's end of a plan stream, which says what a test lets it say."""

    def __init__(self):
        self.written = []
        self._unread = asyncio.Queue()
        self.takes_messages = asyncio.Event()
        self.takes_messages.set()

    def say(self, message):
        self._unread.put_nowait(message)

    def welcome(self, protocol=1, *, has_snapshot=True):
        """Accept the scheduler, with nothing in the snapshot."""
        limits = values.ExecutorLimits(8, 64, 256, 4)
        self.say(values.Welcome(1, 1, protocol, MODEL, values.KvGeometry(64, 4), limits, bytes(32), "digest"))
        if has_snapshot:
            self.say(values.SnapshotPart(num_parts=1))

    async def beat(self, seconds):
        """Say every 0.2 s that it is alive."""
        for _ in range(round(seconds / 0.2)):
            self.say(values.Heartbeat())
            await asyncio.sleep(0.2)

    async def write(self, *messages):
        """Take a message of the scheduler, or several as one."""
        await self.takes_messages.wait()
        self.written.append(messages)

    async def read(self):
        return await self._unread.get()

    def cancel(self):
        """Nothing is held."""


class Listener:
    """Hears what the stream tells its link."""

    def __init__(self):
        self.snapshot = None
        self.num_results = 0
        self.planned = []  # without a result yet

    def waits_in_line(self, notice):
        """Nothing follows from it here."""

    async def accepted(self, welcome, snapshot):
        self.snapshot = snapshot

    def finished_step(self, result):
        assert self.planned.pop(0).step_id == result.step_id
        self.num_results += 1

    def due_step(self):
        return self.planned[0] if self.planned else None

    def going_away(self, notice):
        """Nothing follows from it here."""


class Link:
    """A stream driver with a clock that may jump, as after a standstill of the process."""

    def __init__(self):
        self.executor = ScriptedExecutor()
        self.listener = Listener()
        self.standstill_s = 0.0
        self._loop = asyncio.get_running_loop()
        self.driver = PlanStream(
            self.executor, self.listener, StepCallbacks(self.listener.finished_step, self.listener.due_step), self.now_s
        )

    def now_s(self):
        return self._loop.time() + self.standstill_s

    def run(self, hello=HELLO):
        return self._loop.create_task(self.driver.run(hello))

    async def ready(self, protocol=1):
        task = self.run()
        self.executor.welcome(protocol)
        while self.listener.snapshot is None:
            await asyncio.sleep(0.01)
        return task

    def plan(self, step_id, predicted_s=0.0, **contents):
        """Send a plan that runs nothing."""
        plan = values.BatchPlan(1, 1, step_id, column(), column(), round(predicted_s * 1e9), **contents)
        self.listener.planned.append(plan)
        self.driver.send_plan(plan)

    def finish(self, step_id):
        """Let the executor send the result of a step."""
        executor = make_executor()
        executor.attach("executor:1")
        self.executor.say(replace(executor.execute(values.BatchPlan(1, 1, 1, column(), column(), 0)), step_id=step_id))


async def end_of(task):
    """How a stream ended, and when."""
    with pytest.raises((LinkError, DivergenceError)) as failure:
        await task
    return failure.value, now()


@in_virtual_time
async def test_silence_is_noticed_within_a_second_and_a_half_in_every_phase():
    """After the hello, in line and as the driver: 1.2 s, and a heartbeat's time to look."""
    for phase in ("greeting", "queued", "ready"):
        link = Link()
        start_s = link.now_s()
        task = link.run() if phase != "ready" else await link.ready()
        if phase == "queued":
            link.executor.say(values.WaitingInLine(values.Claim(2, "other")))
        error, end_s = await end_of(task)

        assert isinstance(error, StreamEndedError)
        assert "sent nothing" in str(error)
        assert 1.2 <= end_s - start_s <= 1.5, phase


@pytest.mark.parametrize("is_welcomed", [False, True], ids=["nothing", "a welcome without a snapshot"])
@in_virtual_time
async def test_an_executor_that_lives_and_does_not_get_on_with_its_welcome_loses_the_stream(is_welcomed):
    """Heartbeats alone do not keep it: it is attached again, instead of being waited for until somebody looks."""
    link = Link()
    task = link.run()
    if is_welcomed:
        link.executor.welcome(has_snapshot=False)
    beating = asyncio.get_running_loop().create_task(link.executor.beat(60))
    error, _ = await end_of(task)
    beating.cancel()

    assert "no welcome or no more of its snapshot" in str(error)


@in_virtual_time
async def test_a_place_in_line_is_kept_for_as_long_as_heartbeats_come():
    link = Link()
    task = link.run()
    link.executor.say(values.WaitingInLine(values.Claim(2, "other")))
    await link.executor.beat(60)

    assert not task.done()
    task.cancel()


@in_virtual_time
async def test_a_step_within_its_bound_raises_no_alarm_however_long_it_is_predicted():
    """2.4 times the prediction, at least 1.2 s; heartbeats go on meanwhile."""
    link = Link()
    task = await link.ready()
    for step_id, (predicted_s, actual_s) in enumerate([(0.001, 1.0), (0.5, 1.0), (5.0, 11.8)], 1):
        link.plan(step_id, predicted_s)
        await link.executor.beat(actual_s)
        link.finish(step_id)
    await link.executor.beat(1)

    assert not task.done()
    assert link.listener.num_results == 3
    task.cancel()


@in_virtual_time
async def test_the_second_plan_in_flight_is_timed_from_the_result_of_the_first():
    link = Link()
    task = await link.ready()
    link.plan(1, 0.5)
    link.plan(2, 0.5)
    for step_id in (1, 2):
        await link.executor.beat(1.0)
        link.finish(step_id)
    await link.executor.beat(1)

    assert not task.done()
    task.cancel()


@in_virtual_time
async def test_a_step_beyond_its_bound_is_noticed_although_heartbeats_come():
    """A wedged device, or an executor that hears nothing: half a connection is down."""
    link = Link()
    task = await link.ready()
    link.plan(1, 1.0)
    start_s = link.now_s()
    beating = asyncio.get_running_loop().create_task(link.executor.beat(10))
    error, end_s = await end_of(task)
    beating.cancel()

    assert "step 1 has taken" in str(error)
    assert 2.4 <= end_s - start_s <= 2.7


@pytest.mark.parametrize("standstill_s", [0.9, 1.1, 1.3, 60.0])
@in_virtual_time
async def test_a_standstill_of_this_process_blames_nobody(standstill_s):
    """Neither the executor's silence, whose messages lie unread, nor the step that stood still as well."""
    link = Link()
    task = await link.ready()
    link.plan(1, 0.001)
    await link.executor.beat(0.4)
    await asyncio.sleep(0.15)
    link.standstill_s += standstill_s  # the clock has moved on when the process looks again
    await asyncio.sleep(0.1)
    assert not task.done()
    await link.executor.beat(0.4)
    link.finish(1)
    await asyncio.sleep(0.1)

    assert not task.done()
    task.cancel()


@in_virtual_time
async def test_an_executor_that_died_during_our_standstill_is_noticed_soon_after_it():
    link = Link()
    task = await link.ready()
    await link.executor.beat(0.4)
    link.standstill_s += 60
    start_s = now()
    _, end_s = await end_of(task)

    assert 0.8 <= end_s - start_s <= 1.5


@in_virtual_time
async def test_a_network_that_takes_nothing_ends_the_stream():
    link = Link()
    task = await link.ready()
    link.executor.takes_messages.clear()
    beating = asyncio.get_running_loop().create_task(link.executor.beat(30))
    error, _ = await end_of(task)
    beating.cancel()

    assert "takes no more messages" in str(error)


@in_virtual_time
async def test_a_welcome_in_a_protocol_that_was_not_offered_is_a_divergence():
    """The executor may pick from what it was given only."""
    link = Link()
    task = link.run(replace(HELLO, protocols=ProtocolRange(1, 2)))
    link.executor.welcome(protocol=3)
    error, _ = await end_of(task)

    assert isinstance(error, DivergenceError)
    assert "protocol 3, not one of 1 to 2" in str(error)


@in_virtual_time
async def test_the_snapshot_of_a_welcome_in_an_offered_protocol_is_handed_over():
    link = Link()
    task = link.run(replace(HELLO, protocols=ProtocolRange(1, 3)))
    link.executor.welcome(protocol=2)
    await asyncio.sleep(0.01)

    assert (link.listener.snapshot.rows, list(link.listener.snapshot.tags)) == ((), [])
    task.cancel()


@in_virtual_time
async def test_plans_made_together_travel_as_one_message_but_for_prompts():
    for protocol, together in ((2, [[1, 2], [3], [4]]), (1, [[1], [2], [3], [4]])):
        link = Link()
        task = await link.ready(protocol)
        for step_id in (1, 2):
            link.plan(step_id)
        link.plan(3, new_requests=("a prompt",))
        link.plan(4)
        await asyncio.sleep(0.01)

        sent = [
            [plan.step_id for plan in plans if isinstance(plan, values.BatchPlan)] for plans in link.executor.written
        ]
        assert [step_ids for step_ids in sent if step_ids] == together
        task.cancel()

"""The step thread with several steps in flight: what it launches, what it says is running, in which order it tells."""

import asyncio
import threading
from dataclasses import replace

import grpc
import pytest
from structlog.testing import capture_logs

from executor_rig.forms import WhenTold, choice, letter_forms
from executor_rig.hash_executor import HASH_LIMITS, loaded, serving
from executor_rig.hash_runner import HashRunner, continuation
from executor_rig.hiding_runner import HidingRunner
from executor_rig.plan_client import attached, grants, info_of, request
from executor_rig.plans import placement, plan
from paceline.plan.values import StepResult
from paceline.v1 import plan_pb2
from paceline_executor.errors import DeviceFaultError, PlanError, StepFailedError
from paceline_executor.link.engine import Engine
from paceline_executor.link.step_loop import MIN_STEP_BOUND_NS, StepLoop, StepRefused
from paceline_executor.rows.table import RowTable

PROMPT = [5, 6, 7]
CELLS = [(0, index, index) for index in range(4)]
MINUTE_NS = 60_000_000_000


class HeldRunner(HidingRunner):
    """A device of which no step is done before `let_end` has been called for it."""

    def __init__(self, inner, max_in_flight=2):
        super().__init__(inner, max_in_flight=max_in_flight)
        self._may_end = threading.Semaphore(0)

    def let_end(self, num_steps=1):
        """So many further steps may end."""
        self._may_end.release(num_steps)

    def is_done(self, handle):
        """Whether the oldest may end."""
        may_end = self._may_end.acquire(blocking=False)
        if may_end:
            self._may_end.release()
        return may_end

    def wait(self, handle):
        """Wait as for a device."""
        self._may_end.acquire()
        return super().wait(handle)


class Steps:
    """A step loop on a time of its own, and what it reports."""

    def __init__(self, forms=None):
        self.now_ns = 0
        self.reports = []
        self.inner = HashRunner(HASH_LIMITS.num_blocks, HASH_LIMITS.block_size, HASH_LIMITS.vocab_size)
        self.runner = HeldRunner(self.inner)
        engine = Engine(RowTable(HASH_LIMITS, forms), self.runner, lambda: self.now_ns)
        load = replace(loaded(self.runner), engine=engine)
        self.loop = StepLoop(lambda: load, self.reports.append, lambda: self.now_ns)

    def submit(self, *arguments, **contents):
        """Queue a plan of epoch 1."""
        self.loop.submit(plan(*arguments, **contents))

    def submit_decodes(self, num_plans):
        """A prompt of three tokens, and as many decodes behind it as there are further plans."""
        self.submit([(0, 3)], place=[placement(0, PROMPT)], grants=CELLS)
        for step_id in range(2, num_plans + 1):
            self.submit([(0, 1)], step_id=step_id)


@pytest.fixture
async def steps():
    """Two steps in flight at most."""
    steps = Steps()
    await steps.loop.start()
    steps.loop.begin_epoch(1)
    yield steps
    steps.runner.let_end(100)
    await asyncio.to_thread(steps.loop.stop, 5)


async def until(holds):
    """Wait until something is so."""
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.001)


def tokens_of(reports):
    """The tokens of steps that are done, one after another."""
    return [token for done in reports for token in done.token_ids.tolist()]


async def test_the_next_plan_is_launched_while_the_device_computes(steps):
    steps.submit_decodes(4)
    await until(lambda: steps.inner.num_steps == 2)
    assert steps.reports == []
    steps.runner.let_end()
    await until(lambda: steps.inner.num_steps == 3)
    assert [done.step_id for done in steps.reports] == [1]
    steps.runner.let_end(3)
    await until(lambda: len(steps.reports) == 4)
    assert tokens_of(steps.reports) == continuation(PROMPT, 4, HASH_LIMITS.vocab_size)


async def test_a_step_draws_when_a_form_is_compiled_that_was_not_at_its_launch():
    pool = WhenTold()
    steps = Steps(letter_forms(HASH_LIMITS.vocab_size, [7], pool))
    await steps.loop.start()
    steps.loop.begin_epoch(1)
    placed = placement(0, PROMPT, end_token_ids=[7], structured=choice("b"))
    steps.loop.submit(replace(plan([(0, 3)], place=[placed], grants=CELLS), predicted_ns=MINUTE_NS))
    await until(lambda: steps.runner.deepest)
    pool.finish()
    steps.runner.let_end()
    await until(lambda: steps.reports)
    assert tokens_of(steps.reports) == ["abc".index("b")]
    await asyncio.to_thread(steps.loop.stop, 5)


async def test_the_running_step_is_the_oldest_and_begins_when_the_one_before_it_has_ended(steps):
    """So that its bound is its own; that of all in flight is the time by which a snapshot can be had."""
    steps.submit_decodes(2)
    await until(lambda: steps.inner.num_steps == 2)
    assert (steps.loop.running.step_id, steps.loop.last_step_id) == (1, 0)
    assert (steps.loop.running.bound_ns, steps.loop.bound_ns) == (MIN_STEP_BOUND_NS, 2 * MIN_STEP_BOUND_NS)
    steps.now_ns = 1000
    steps.runner.let_end()
    await until(lambda: steps.loop.last_step_id == 1)
    running = steps.loop.running
    assert (running.step_id, running.started_ns, running.bound_ns) == (2, 1000, 1000 + MIN_STEP_BOUND_NS)
    steps.now_ns = 1500
    steps.runner.let_end()
    await until(lambda: len(steps.reports) == 2)
    assert (steps.loop.running, steps.loop.bound_ns) == (None, 0)
    waited = [done.timings.waited_ns for done in steps.reports]
    assert (waited, steps.reports[1].timings.idle_ns) == ([0, 1000], 0)


async def test_a_question_is_answered_when_all_that_is_launched_has_landed(steps):
    steps.submit_decodes(2)
    await until(lambda: steps.inner.num_steps == 2)
    answer = asyncio.create_task(steps.loop.ask(lambda table: table.states()))
    steps.runner.let_end()
    await until(lambda: steps.loop.last_step_id == 1)
    assert not answer.done()
    steps.runner.let_end()
    (state,) = await answer
    assert state.output_token_ids.tolist() == continuation(PROMPT, 2, HASH_LIMITS.vocab_size)
    assert [done.step_id for done in steps.reports] == [1, 2]


async def test_a_refused_plan_is_told_after_the_steps_before_it(steps):
    steps.submit_decodes(1)
    steps.submit([(3, 1)], step_id=2)
    steps.submit([(0, 1)], step_id=3)
    steps.runner.let_end(3)
    await until(lambda: len(steps.reports) == 2)
    assert await steps.loop.ask(lambda table: table.num_rows_in_use) == 1
    done, refused = steps.reports
    assert (type(done), type(refused), type(refused.error)) == (StepResult, StepRefused, PlanError)
    assert (steps.inner.num_steps, refused.failed) == (1, None)


async def test_a_step_that_fails_at_its_launch_is_told_after_the_steps_before_it(steps):
    steps.submit_decodes(1)
    await until(lambda: steps.inner.num_steps == 1)
    steps.inner.fail_next = MemoryError("of the test")
    steps.submit([(0, 1)], step_id=2)
    await until(lambda: steps.inner.num_steps == 2)
    steps.runner.let_end()
    await until(lambda: len(steps.reports) == 2)
    done, refused = steps.reports
    assert done.step_id == 1
    assert (type(refused.error), refused.failed.step_id) == (StepFailedError, 2)


async def test_the_line_about_a_failed_step_names_its_requests(steps):
    """The first four, and their traces: those that ran before and those that its plan has placed."""
    steps.runner.let_end(2)
    names = [f"r-{row}" for row in range(6)]
    requests = [placement(row, PROMPT, name=name) for row, name in enumerate(names)]
    traces = {row: f"{row + 1:032x}" for row in (0, 5)}
    for row, trace_id in traces.items():
        requests[row] = replace(requests[row], trace_parent=f"00-{trace_id}-{1:016x}-01")
    cells = [(row, 0, row) for row in range(6)]
    with capture_logs() as lines:
        steps.submit([(5, 3)], place=[requests[5]], grants=[cells[5]])
        await until(lambda: len(steps.reports) == 1)
        steps.inner.fail_next = MemoryError("of the test")
        rows = [(5, 1), *((row, 3) for row in range(5))]
        steps.submit(rows, step_id=2, place=requests[:5], grants=cells[:5])
        await until(lambda: len(steps.reports) == 2)
    (line,) = [line for line in lines if line["event"] == "step_failed"]
    assert line["num_rows"] == 6
    assert line["request_ids"] == ["r-5", *names[:3]]
    assert line["trace_ids"] == [traces[5], traces[0]]


async def test_a_device_that_fails_while_it_computes_is_told_and_ends_the_executor():
    """Nothing can be taken back: the stream says so, and the process ends with the reason."""
    runner = HidingRunner(HashRunner(HASH_LIMITS.num_blocks, HASH_LIMITS.block_size, HASH_LIMITS.vocab_size))
    async with serving(lambda: loaded(runner)) as (service, address), attached(address) as client:
        runner.lose_next = RuntimeError("an illegal memory access")
        placing = plan_pb2.BatchPlan(new_requests=[request(0, PROMPT)], grants=grants(CELLS))
        await client.step([(0, 3)], placing)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await client.result()
        with pytest.raises(DeviceFaultError, match=r"the device failed.*this executor ends"):
            await service.run()
    assert info_of(failure.value).reason == "STEP_FAILED"


async def test_a_device_that_fails_beside_a_step_that_never_ends_is_told_and_ends_the_executor():
    runner = HeldRunner(HashRunner(HASH_LIMITS.num_blocks, HASH_LIMITS.block_size, HASH_LIMITS.vocab_size))
    async with serving(lambda: loaded(runner)) as (service, address), attached(address) as client:
        await client.step([(0, 3)], plan_pb2.BatchPlan(new_requests=[request(0, PROMPT)], grants=grants(CELLS)))
        while service._steps.running is None:
            await asyncio.sleep(0.01)
        service.fail(DeviceFaultError("a rank has ended"))
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await client.result()
        with pytest.raises(DeviceFaultError, match="a rank has ended"):
            await service.run()
        async with asyncio.timeout(2):
            await service.stop()
        runner.let_end()
    assert (info_of(failure.value).reason, failure.value.details()) == ("STEP_FAILED", "a rank has ended")


async def test_records_go_in_time_however_often_questions_are_asked(steps):
    """Who looks every second keeps the thread from being idle, and nobody's prompts here."""
    steps.runner.let_end(2)
    steps.submit_decodes(1)
    steps.submit(step_id=2, finish=[(0, 1)])
    await until(lambda: len(steps.reports) == 2)
    assert await steps.loop.ask(lambda table: table.num_records) == 1
    steps.now_ns = MINUTE_NS + 1
    assert await steps.loop.ask(lambda table: table.num_records) == 0

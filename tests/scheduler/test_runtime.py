"""The runtime joins core, edge and links: what arrives goes in, what comes out goes where it belongs, at once."""

import asyncio
import dataclasses
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from both_sides.audited import expected_output, make_executor
from edge_rig.tokenizers import byte_level_tokenizer, tokenizer_source
from paceline.plan.values import Claim, ExecutorInfo, Model, StepPoint, StepTimings
from paceline_scheduler import errors
from paceline_scheduler.core import events
from paceline_scheduler.core.core import Core
from paceline_scheduler.core.limits import CoreLimits, LimitValues
from paceline_scheduler.core.live import RESUME_WINDOW_S
from paceline_scheduler.core.outputs import TokenOutputs
from paceline_scheduler.link.claim import OwnClaim
from paceline_scheduler.link.executors import LinkedExecutors
from paceline_scheduler.link.leadership import Leadership, ServingStatus
from paceline_scheduler.link.linked_executor import ShownState
from paceline_scheduler.link.listener import Listener
from paceline_scheduler.link.steward import Steward
from paceline_scheduler.observers.steps import DraftTotals, StepObserver, StepTotals, _count, _gaps
from paceline_scheduler.runtime import Runtime
from scheduler_rig.collector import OutputCollector
from scheduler_rig.requests import column, make_request
from virtual_time.clock import ManualClock

ADDRESS = "executor:1"
TOKENIZER = tokenizer_source(byte_level_tokenizer())


def step_ns(num_tokens):
    """How long a step of the executor takes."""
    return make_executor().kind.step_times.step_ns(num_tokens, 0)


class RuntimeBench:
    """A runtime, an executor and the plans that are on their way to it."""

    def __init__(self, **options) -> None:
        self.clock = ManualClock(100.0)
        self.runtime = Runtime(Core(CoreLimits()), self.clock, asyncio.get_running_loop())
        self.client = OutputCollector()
        self.runtime.deliver_to(self.client)
        self.steps = StepObserver(self.runtime.views)
        self.leadership = Leadership(OwnClaim("scheduler-a"))
        self.executors = LinkedExecutors(self.runtime, self.steps, self.leadership)
        self.listener = Listener(self.runtime, self.executors)
        self.statuses = []
        self.executors.on_readiness(lambda readiness: self.statuses.append(readiness.status))
        self.executor = make_executor(**options)
        self.plans = []
        self.steward = Steward(self.leadership, self.listener, self.clock, lambda: 0.5, lambda *_: None)
        self.steward.expect(ADDRESS)

    def look(self):
        """Learn that there is one executor."""
        self.leadership.look((ADDRESS,), {}, self.clock())
        self.listener.looked((ADDRESS,))

    def submit(self, *requests):
        self.runtime.feed(events.Submit(requests))

    def send_plan(self, plan):
        """Be the port of the executor's stream."""
        self.plans.append(plan)

    async def attach(self):
        description, snapshot = self.executor.attach(ADDRESS)
        card = Model("simulated", "simulated", 256, 32_000, 0, "")
        self.steward.found(ADDRESS, ExecutorInfo(description.incarnation, 0, ""))
        self.steward.welcomed(description)
        self.listener.attached(card, TOKENIZER, description, snapshot, self)

    async def until_idle(self):
        while any(self.runtime.views.with_listener()):
            await asyncio.sleep(0)

    async def step(self):
        """Let the loop turn once, then run the oldest plan, after 10 ns of waiting for it, and bring its result."""
        await asyncio.sleep(0)
        result = self.executor.execute(self.plans.pop(0))
        timings = dataclasses.replace(result.timings, idle_ns=10)
        self.listener.finished_step(ADDRESS, dataclasses.replace(result, timings=timings))

    async def finish(self):
        await asyncio.sleep(0)
        while self.plans:
            await self.step()


async def attached_bench(**options):
    bench = RuntimeBench(**options)
    await bench.attach()
    return bench


async def test_submits_of_one_turn_make_one_plan():
    """32 requests that arrive together share a step instead of taking one each."""
    bench = await attached_bench(max_num_rows=64, max_num_batched_tokens=256)
    requests = [make_request(2, 2) for _ in range(32)]
    for request in requests:
        bench.submit(request)
    assert bench.plans == []
    await asyncio.sleep(0)
    assert [len(plan.new_requests) for plan in bench.plans][:1] == [32]
    await bench.finish()
    assert all(tuple(bench.client.token_ids[r.handle]) == expected_output(r) for r in requests)


async def test_as_many_plans_are_on_their_way_as_the_executor_takes():
    bench = await attached_bench()
    bench.submit(make_request(3, 10))
    await asyncio.sleep(0)
    assert len(bench.plans) == 4
    bench.listener.finished_step(ADDRESS, bench.executor.execute(bench.plans.pop(0)))
    assert len(bench.plans) == 4


async def test_an_idle_executor_is_told_of_an_end_with_the_next_request_or_soon():
    """A message of its own would cost more than the rest of a short step."""
    bench = await attached_bench()
    bench.submit(make_request(3, 1))
    await bench.finish()
    assert bench.plans == []
    bench.submit(make_request(3, 1))
    await asyncio.sleep(0)
    (plan,) = bench.plans
    assert (len(plan.releases), len(plan.new_requests)) == (1, 1)
    await bench.finish()
    await asyncio.wait_for(until(lambda: bench.plans), 1)
    assert [len(plan.releases) for plan in bench.plans] == [1]


async def test_a_plan_behind_a_long_step_waits_and_takes_requests_along_that_come_meanwhile():
    """Two steps of 40 ms would be planned at once otherwise, and who comes behind them waits for both."""
    bench = await attached_bench(step_points=[StepPoint(1, 40_000_000), StepPoint(64, 41_000_000)])
    bench.submit(make_request(3, 10))
    await asyncio.sleep(0)
    assert len(bench.plans) == 1
    bench.submit(make_request(3, 10))
    bench.clock.advance(0.020)
    await asyncio.wait_for(until(lambda: len(bench.plans) > 1), 1)
    assert [len(plan.new_requests) for plan in bench.plans] == [1, 1]


async def until(holds):
    while not holds():
        await asyncio.sleep(0.001)


async def test_without_an_executor_requests_are_refused_with_a_time_to_try_again():
    bench = RuntimeBench()
    with pytest.raises(errors.NoExecutorError) as refusal:
        bench.submit(make_request())
    assert refusal.value.retry_after_s > 0
    await asyncio.wait_for(bench.until_idle(), 5)
    assert bench.executors.readiness.status is ServingStatus.NOT_SERVING


async def test_a_draining_scheduler_refuses_and_finishes():
    bench = await attached_bench()
    request = make_request(3, 3)
    bench.submit(request)
    bench.runtime.feed(events.BeginDrain())
    assert bench.statuses == [ServingStatus.SERVING, ServingStatus.NOT_SERVING]
    with pytest.raises(errors.DrainingError):
        bench.submit(make_request())
    await bench.finish()
    await asyncio.wait_for(bench.until_idle(), 5)
    assert tuple(bench.client.token_ids[request.handle]) == expected_output(request)


async def test_nobody_is_served_once_it_is_known_that_no_executor_has_what_somebody_may_come_back_to():
    bench = RuntimeBench()
    assert not bench.executors.is_at_rest, "nobody has looked which executors there are"
    bench.look()
    assert not bench.executors.is_at_rest
    await bench.attach()
    assert bench.executors.is_at_rest
    request = make_request(3, 3, is_resumable=True)
    bench.submit(request)
    assert not bench.executors.is_at_rest
    bench.runtime.feed(events.Detach(request.handle))
    bench.steward.ended(ADDRESS, errors.StreamEndedError("cut"))
    assert not bench.executors.is_at_rest
    bench.runtime.feed(events.Cancel(request.key))
    assert bench.executors.is_at_rest


async def test_a_scheduler_takes_over_what_somebody_may_come_back_to():
    """It has what another one began: nobody listens to it yet."""
    bench = await attached_bench()
    bench.submit(make_request(3, 30, is_resumable=True))
    await bench.step()
    successor = RuntimeBench()
    successor.executor = bench.executor
    successor.look()
    await successor.attach()
    assert not successor.executors.is_at_rest
    await successor.finish()
    assert successor.executors.is_at_rest


async def test_a_scheduler_that_waits_in_line_serves_nobody():
    bench = RuntimeBench()
    bench.look()
    bench.steward.in_line(ADDRESS, Claim(7, "other", "there:1"))
    assert bench.executors.is_at_rest


async def test_a_draining_executor_still_serves_its_model_but_takes_nothing_new():
    bench = await attached_bench()
    assert bench.runtime.feed(events.DrainExecutor(ADDRESS)) == 0
    assert bench.statuses == [ServingStatus.SERVING, ServingStatus.NOT_SERVING]
    assert [model.name for model in bench.executors.models()] == ["simulated"]
    assert bench.executors.open_models() == ()
    with pytest.raises(errors.NoExecutorError) as refusal:
        bench.submit(make_request())
    assert refusal.value.retry_after_s > 0


async def test_an_executor_whose_stream_has_just_broken_still_serves():
    bench = await attached_bench()
    bench.steward.ended(ADDRESS, errors.StreamEndedError("cut"))
    assert bench.executors.readiness.status is ServingStatus.SERVING, "it is expected back"


async def test_what_is_given_up_is_told_once_and_stays_with_the_executor():
    bench = await attached_bench()
    request = make_request(3, 50)
    bench.submit(request)
    await bench.step()
    bench.listener.give_up("shutting down")
    assert isinstance(bench.client.failures[request.handle], errors.GivenUpError)
    bench.listener.give_up("shutting down")
    with pytest.raises(errors.DivergenceError):
        await bench.step()
    assert [row.record_id for row in bench.executor.rows.values()] == [request.key]


async def test_watchers_see_every_step_and_only_while_they_watch():
    bench = await attached_bench()
    records = []

    class Sink:
        def step_finished(self, record):
            records.append(record)

    sink = Sink()
    bench.steps.watch.add(sink)
    bench.submit(make_request(5, 2))
    await bench.finish()
    assert [record.step_id for record in records] == list(range(1, len(records) + 1))
    first = records[0]
    assert (first.num_rows, first.num_tokens, first.num_output_tokens) == (1, 5, 1)
    assert first.forward_ns == step_ns(5)
    assert first.num_used_blocks + first.num_free_blocks + first.num_cached_blocks == first.num_total_blocks == 64
    bench.steps.watch.remove(sink)
    seen = len(records)
    bench.submit(make_request(5, 2))
    await bench.finish()
    assert len(records) == seen


async def test_steps_are_added_up_and_waiting_counts_as_starving_only_while_there_is_work():
    """Both requests arrive at an executor that has nothing else to do: before their first steps it did not starve."""
    bench = await attached_bench()
    for _ in range(2):
        bench.submit(make_request(5, 3))
        await bench.finish()
    totals = bench.executors.statuses()[0].steps
    num_steps = bench.executor.num_steps
    assert (totals.num_steps, totals.num_rows, totals.num_output_tokens) == (num_steps, 6, 6)
    assert totals.forward_ns == 2 * step_ns(5) + 4 * step_ns(1)
    assert (totals.idle_ns, totals.starved_ns) == (10 * num_steps, 10 * (num_steps - 2))


async def test_watchers_learn_of_each_step_what_was_expected_and_when_clients_got_tokens():
    """Two requests side by side: their gaps are one number, twice; what steps were expected to take adds up."""
    bench = await attached_bench()
    records = []
    bench.steps.watch.add(SimpleNamespace(step_finished=records.append))
    bench.submit(make_request(5, 3), make_request(5, 3))
    await bench.finish()
    assert sum(len(record.first_token_ns) for record in records) == 2
    assert sum(count for record in records for _, count in record.gaps) == 4
    assert all(list(record.gaps) == sorted(record.gaps) for record in records)
    totals = bench.executors.statuses()[0].steps
    assert totals.predicted_ns == sum(record.predicted_ns for record in records) > 0


_batches = st.lists(
    st.lists(st.tuples(st.one_of(st.just(float("nan")), st.floats(1e-5, 10)), st.integers(0, 4)), max_size=8),
    max_size=3,
)


@given(batches=_batches)
def test_gaps_of_a_step_are_those_of_each_token_rounded(batches):
    """Token by token: each of several that came together took an equal part, a first one none."""
    expected = Counter()
    for batch in batches:
        for seconds, num_tokens in batch:
            if seconds == seconds:
                expected.update(round(seconds / num_tokens * 1e5) * 10_000 for _ in range(num_tokens))
    told = [
        TokenOutputs(
            handles=(),
            offsets=column(),
            num_tokens=column(*(count for _, count in batch)),
            token_ids=column(),
            attempts=column(),
            rolling_hashes=np.zeros(0, np.uint64),
            intervals_s=np.array([seconds for seconds, _ in batch]),
        )
        for batch in batches
    ]
    assert _gaps(tuple(told)) == tuple(sorted(expected.items()))


def test_drafts_are_counted_by_their_place():
    """Of two rows: the first had two drafts and one right, the second none; a step later one of three is right."""
    totals, planning = StepTotals(), SimpleNamespace(follows_work=True, planning_ns=1, predicted_ns=1)
    for verified, accepted in (([2, 0], [2, 1]), ([3, 1], [2, 2])):
        columns = {"num_draft_tokens": column(*verified), "num_accepted": column(*accepted)}
        _count(totals, planning, SimpleNamespace(timings=StepTimings(), rows=(0, 1), token_ids=(), **columns))
    assert totals.drafts == DraftTotals(6, 3, (3, 2, 1), (3, 0, 0))


def test_sums_of_times_stop_at_what_travels():
    """One executor that makes up a time takes nobody the sums of the others."""
    totals = StepTotals()
    planning = SimpleNamespace(follows_work=True, planning_ns=1, predicted_ns=1)
    times = StepTimings(*[2**63 - 2] * 6)
    result = SimpleNamespace(timings=times, rows=(), token_ids=(), num_draft_tokens=())
    for _ in range(3):
        _count(totals, planning, result)
    assert (totals.idle_ns, totals.starved_ns, totals.forward_ns, totals.draft_ns) == (2**63 - 1,) * 4
    assert totals.num_steps == 3


async def test_limits_are_all_set_and_change_one_by_one():
    bench = await attached_bench(max_num_batched_tokens=48)
    limits = bench.runtime.views.limits()
    assert limits == LimitValues(1024, 4_194_304, 48)
    bench.runtime.feed(events.SetLimits(dataclasses.replace(limits, max_num_queued_reqs=1)))
    assert bench.runtime._core._state.limits.max_num_batched_tokens is None
    bench.runtime.feed(events.SetLimits(LimitValues(5, 600, 32)))
    assert bench.runtime.views.limits() == LimitValues(5, 600, 32)


async def test_after_a_displacement_the_scheduler_begins_anew():
    bench = await attached_bench()
    bench.runtime.feed(events.SetLimits(LimitValues(5, 600, 32)))
    bench.submit(make_request(3, 50))
    bench.steward.ended(ADDRESS, errors.TermSupersededError(Claim(9, "scheduler-z")))
    assert bench.executors.models() == ()
    assert bench.executors.statuses()[0].state == ShownState.LOST
    assert bench.statuses == [ServingStatus.SERVING, ServingStatus.STANDBY]
    bench.plans.clear()
    await bench.attach()
    assert bench.runtime.views.limits() == LimitValues(5, 600, 32)
    request = make_request(3, 2)
    bench.submit(request)
    await bench.finish()
    assert tuple(bench.client.token_ids[request.handle]) == expected_output(request)


async def test_an_executor_that_is_removed_leaves_nothing():
    """It is neither listed nor planned for."""
    bench = await attached_bench()
    bench.steward.remove(ADDRESS)
    assert bench.executors.statuses() == ()
    with pytest.raises(errors.NoExecutorError):
        bench.submit(make_request())


async def test_what_is_let_happen_by_a_delivery_wakes_the_scheduler_in_time():
    """A client that goes away at its first token is waited for, and not for ever: nothing else has to happen."""

    class LeavingClient(OutputCollector):
        def deliver(self, tokens, failures):
            super().deliver(tokens, failures)
            bench.runtime.feed(events.Detach(request.handle))

    bench = await attached_bench()
    request = make_request(3, 30, is_resumable=True)
    bench.runtime.deliver_to(LeavingClient())
    bench.submit(request)
    await bench.step()
    assert bench.runtime._alarm._at_s == bench.clock() + RESUME_WINDOW_S


async def test_observers_see_what_happens_in_order_and_before_anything_comes_of_it():
    bench, seen = await attached_bench(), []

    class Witness:
        def saw(self, event, now, effects):
            seen.append((type(event).__name__, len(bench.plans)))

        def planned(self, address, now, plan, planning_ns):
            seen.append(("no plan" if plan is None else f"plan {plan.step_id}", len(bench.plans)))

    bench.runtime.show_plans(Witness())
    request = make_request(3, 2)
    bench.submit(request)
    with pytest.raises(errors.DuplicateRequestError):
        bench.submit(request)
    await asyncio.sleep(0)
    bench.listener.finished_step(ADDRESS, bench.executor.execute(bench.plans.pop(0)))
    assert seen == [
        ("Submit", 0),
        ("Tick", 0),
        ("plan 1", 0),
        ("plan 2", 1),
        ("no plan", 2),
        ("StepFinished", 1),
        ("no plan", 1),
    ]

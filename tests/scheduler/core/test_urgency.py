"""Who goes first: priorities, deadlines, and that nobody waits for ever; what cannot end in time is not begun."""

from dataclasses import replace

import pytest

from both_sides.audited import make_executor
from both_sides.harness import CoreHarness, running
from paceline.plan.values import StepPoint
from paceline_scheduler.core.events import Tick
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.live import PATIENCE_S
from paceline_scheduler.errors import DeadlineUnreachableError, QueueFullError
from scheduler_rig.requests import make_request


def order_of_placement(harness):
    """Run everything and return the handles as they were placed."""
    placed = []
    while (plan := harness.step()) is not None:
        placed += [placement.request.handle for placement in plan.new_requests]
    return placed


def one_at_a_time():
    """Return a harness whose executor has a single row, taken by request 99."""
    return running(make_request(2, 2, handle=99), on=make_executor(max_num_rows=1))


def test_a_lower_priority_number_goes_first():
    harness = one_at_a_time()
    harness.submit(
        make_request(2, 1, handle=1, priority=1, deadline_s=20.0),
        make_request(2, 1, handle=2),
        make_request(2, 1, handle=3, priority=-1),
    )
    assert order_of_placement(harness) == [3, 2, 1]


def test_within_a_priority_the_earliest_deadline_goes_first():
    harness = one_at_a_time()
    harness.submit(
        make_request(2, 1, handle=1),
        make_request(2, 1, handle=2, deadline_s=20.0),
        make_request(2, 1, handle=3, deadline_s=10.0),
        make_request(2, 1, handle=4),
    )
    assert order_of_placement(harness) == [3, 2, 1, 4]


@pytest.mark.parametrize(("priority", "patience"), [(0, 1), (1, 2), (5, 6)])
def test_nothing_starves_behind_newcomers_that_are_more_urgent(priority, patience):
    harness = one_at_a_time()
    harness.submit(make_request(2, 1, handle=1, priority=priority))
    harness.clock.advance(PATIENCE_S * patience - 1.0)
    harness.submit(make_request(2, 1, handle=2, deadline_s=harness.clock() + 0.5))
    harness.clock.advance(2.0)
    harness.submit(make_request(2, 1, handle=3, deadline_s=harness.clock() + 0.5))
    harness.submit(make_request(2, 1, handle=4))
    assert [live.request.handle for live in harness.views.waiting_requests()] == [2, 1, 3, 4]


def test_a_preempted_request_keeps_its_place():
    harness = CoreHarness(make_executor(num_blocks=8))
    harness.expect_short_outputs()
    harness.submit(make_request(8, 20, handle=1), make_request(8, 20, handle=2))
    harness.step()
    harness.step_until_preempted()
    harness.submit(make_request(2, 1, handle=3))
    assert order_of_placement(harness) == [2, 3]


def test_the_least_urgent_request_is_preempted_not_the_newest():
    harness = CoreHarness(make_executor(num_blocks=8))
    harness.expect_short_outputs()
    harness.submit(make_request(8, 20, handle=1), make_request(8, 20, handle=2, deadline_s=25.0))
    harness.step()
    harness.step_until_preempted()
    assert [live.request.handle for live in harness.views.waiting_requests()] == [1]


def slow_harness(**limits):
    """Return a harness whose executor needs 10 ms a step and 10 ms a token."""
    points = (StepPoint(1, 20_000_000), StepPoint(64, 650_000_000))
    return CoreHarness(make_executor(step_points=points), limits=CoreLimits(**limits))


def fill(harness):
    """Submit prompts of 64 tokens until one is refused; returns how many were taken."""
    for taken in range(100):
        try:
            harness.submit(make_request(64, 4))
        except QueueFullError:
            return taken
    raise AssertionError("nothing is refused")


def test_what_cannot_end_in_time_is_refused_before_it_costs_a_step():
    """200 tokens take two seconds there: with one second left nothing is computed for it, and it is told why."""
    harness = slow_harness()
    harness.submit(make_request(200, 4, handle=1, deadline_s=1.0), make_request(50, 4, handle=2, deadline_s=1.0))
    plan = harness.step()
    assert [placement.request.handle for placement in plan.new_requests] == [2]
    assert isinstance(harness.client.failures[1], DeadlineUnreachableError)
    assert "not started" in str(harness.client.failures[1])


def test_min_tokens_beyond_the_context_do_not_make_a_request_hopeless():
    """The context's end ends the output, whatever was asked for: 56 tokens at most come, in about a second."""
    harness = slow_harness()
    request = replace(make_request(200, None, handle=1, deadline_s=4.0), min_tokens=2**31 - 1)
    harness.submit(request)
    assert harness.step().new_requests


def test_what_became_hopeless_while_it_waited_is_not_started_either():
    """It would have been in time, had there been a row at once."""
    harness = slow_harness()
    harness.submit(make_request(50, 4, handle=1, deadline_s=1.0))
    harness.clock.advance(0.6)
    assert harness.plan() is None
    assert isinstance(harness.client.failures[1], DeadlineUnreachableError)


def test_a_request_whose_first_token_would_come_too_late_is_refused_with_the_time_to_wait():
    """The queue is bounded in seconds of work too: 64 tokens take 0.65 s, two seconds the limit is."""
    harness = slow_harness(ttft_budget_s=2.0)
    taken = fill(harness)
    with pytest.raises(QueueFullError, match="the limit is") as refused:
        harness.submit(make_request(64, 4))
    assert taken == 2
    assert 0.1 <= refused.value.retry_after_s <= 1.0


def test_a_queue_that_takes_too_long_refuses_before_a_prompt_is_known():
    """What waits is more than the budget allows: whatever comes behind it need not be tokenised."""
    harness = slow_harness(ttft_budget_s=2.0)
    harness.views.require_time("simulated", harness.clock())
    fill(harness)
    harness.submit(make_request(64, 4, priority=-1))
    with pytest.raises(QueueFullError, match="the limit is"):
        harness.views.require_time("simulated", harness.clock())
    harness.views.require_time("another model", harness.clock())


def test_an_urgent_request_is_not_refused_for_what_would_wait_behind_it():
    """Only what is ahead of it in the line counts."""
    harness = slow_harness(ttft_budget_s=2.0)
    fill(harness)
    harness.submit(make_request(64, 4, handle=1, priority=-1))
    assert harness.step().new_requests[0].request.handle == 1


def test_background_work_does_not_refuse_what_is_more_urgent():
    """Only what is ahead of a request of usual urgency counts before its prompt is known."""
    harness = slow_harness(ttft_budget_s=2.0)
    for _ in range(2):
        harness.submit(make_request(64, 4, priority=50))
    with pytest.raises(QueueFullError):
        harness.submit(make_request(64, 4, priority=50))
    harness.views.require_time("simulated", harness.clock())


def test_a_machine_whose_lone_step_is_slow_still_runs_requests_beside_each_other():
    """A token more costs next to nothing there: waiting for each other would help nobody."""
    points = (StepPoint(1, 260_000_000), StepPoint(64, 300_000_000))
    harness = running(*(make_request(3, 20) for _ in range(4)), on=make_executor(step_points=points), steps=0)
    assert len(harness.step().new_requests) == 4


def test_requests_are_not_refused_for_ever_on_the_word_of_a_stale_forecast():
    """The executor became fast again while nothing ran: one in so many is tried, and the forecast mends itself."""
    points = (StepPoint(1, 2_000_000), StepPoint(64, 66_000_000))
    harness = CoreHarness(make_executor(step_points=points))
    for _ in range(100):
        harness.views.executor("executor-0").step_time.observe(50, 1000, 600_000_000)
    for handle in range(1, 201):
        harness.submit(make_request(50, 1, handle=handle, deadline_s=harness.clock() + 0.5))
        harness.finish()
        harness.clock.advance(1.0)
    assert 200 in harness.client.finishes


def test_what_has_begun_is_not_called_hopeless():
    """It was preempted and time is short: its client has tokens, so it goes on until its deadline has passed."""
    points = (StepPoint(1, 20_000_000), StepPoint(64, 650_000_000))
    harness = CoreHarness(make_executor(step_points=points, num_blocks=8))
    harness.expect_short_outputs()
    harness.submit(make_request(8, 20, handle=1, deadline_s=5.0), make_request(8, 20, handle=2, deadline_s=6.0))
    harness.step()
    harness.step_until_preempted()
    harness.clock.advance(5.99)
    assert not harness.feed(Tick())


def test_an_urgent_request_does_not_wait_for_a_long_prompt_that_is_less_so():
    harness = running(make_request(200, 4), on=make_executor(max_num_batched_tokens=16))
    harness.submit(make_request(3, 3, handle=77, priority=-3))
    assert [placement.request.handle for placement in harness.step().new_requests] == [77]


def test_plans_that_run_nothing_teach_nothing():
    """Their result says 0 ns: the base of the forecast stays what steps take."""
    points = (StepPoint(1, 50_000_000), StepPoint(64, 60_000_000))
    harness = CoreHarness(make_executor(step_points=points))
    for _ in range(50):
        harness.submit(make_request(3, 1))
        harness.finish()
    assert harness.views.executor("executor-0").step_time.predict_ns(3, 6) == pytest.approx(50_300_000, rel=0.1)


def test_the_time_to_come_back_is_that_of_rows_where_these_are_short():
    """Two rows hold long outputs: their end is what whoever is refused waits for, not four tiny prompts."""
    points = (StepPoint(1, 50_000_000), StepPoint(64, 60_000_000))
    executor = make_executor(step_points=points, max_num_rows=2, num_blocks=1024, max_model_len=1024)
    harness = CoreHarness(executor, limits=CoreLimits(max_num_queued_reqs=4, ttft_budget_s=1e6))
    for _ in range(60):
        harness.views.executor("executor-0").output_lengths.observe(800)
    harness.submit(*(make_request(3, 800) for _ in range(2)))
    harness.step()
    harness.submit(*(make_request(3, 800) for _ in range(4)))
    with pytest.raises(QueueFullError) as refused:
        harness.submit(make_request(3, 800))
    assert refused.value.retry_after_s > 10

"""No executor of a model is there: who waits for one, for how long, and what is said meanwhile."""

from dataclasses import replace

import pytest

from both_sides.audited import make_executor
from both_sides.harness import CoreHarness, running
from paceline_scheduler.core.answers import RequestState
from paceline_scheduler.core.events import DrainExecutor, StreamEnded, UndrainExecutor
from paceline_scheduler.core.request import MAX_OUTAGE_S
from paceline_scheduler.errors import DeadlineExceededError, NoExecutorError, OutageError
from scheduler_rig.requests import make_request

FIRST, SECOND = "executor-0", "executor-1"


def restarting():
    """A system whose only executor was told to end, did so, and loads its model again."""
    harness = CoreHarness(make_executor())
    harness.feed(DrainExecutor(FIRST, is_leaving=True))
    harness.feed(StreamEnded(FIRST))
    harness.lose()
    harness.executors[FIRST].restart()
    return harness


@pytest.mark.parametrize("happens", ["leaves", "breaks", "is lost"])
def test_requests_for_an_executor_that_is_away_wait_and_run_in_their_order_when_it_is_back(happens):
    harness = CoreHarness(make_executor(max_num_rows=1))
    if happens == "leaves":
        harness.feed(DrainExecutor(FIRST, is_leaving=True))
    elif happens == "breaks":
        harness.feed(StreamEnded(FIRST))
    else:
        harness.lose()
    later, urgent = make_request(5, 2, handle=1), make_request(5, 2, handle=2, priority=-1)
    harness.submit(later, urgent)
    explained = harness.explain(urgent)
    assert (explained.state, explained.queue_position) == (RequestState.WAITING, 0)
    assert FIRST in explained.waiting_for
    harness.pass_time(MAX_OUTAGE_S - 1)
    harness.executors[FIRST].restart()
    harness.attach()
    assert [placement.request.handle for placement in harness.plan().new_requests] == [2]
    harness.finish()
    harness.assert_whole(later, urgent)


def test_a_request_waits_for_an_executor_only_as_long_as_its_client_does():
    harness = restarting()
    patient, usual = replace(make_request(handle=1), max_outage_s=90.0), make_request(handle=2)
    returning = replace(make_request(handle=3), waited_s=50.0)
    harness.submit(patient, usual, returning)
    assert harness.wake_at == 10.0
    harness.pass_time(10.0)
    assert set(harness.client.failures) == {3}
    harness.pass_time(MAX_OUTAGE_S - 10.0)
    assert isinstance(harness.client.failures[2], OutageError)
    assert "60 s" in str(harness.client.failures[2])
    assert harness.views.num_waiting()[0] == 1
    harness.attach()
    harness.finish()
    harness.assert_whole(patient)


def test_the_time_without_an_executor_counts_and_not_the_time_behind_others():
    harness = running(make_request(5, 200, handle=1), on=make_executor(max_num_rows=1))
    queued = make_request(5, 2, handle=2)
    harness.submit(queued)
    harness.pass_time(2 * MAX_OUTAGE_S)
    harness.feed(StreamEnded(FIRST))
    harness.pass_time(MAX_OUTAGE_S - 1)
    assert not harness.client.failures
    harness.attach()
    harness.pass_time(2 * MAX_OUTAGE_S)
    harness.feed(StreamEnded(FIRST))
    harness.pass_time(MAX_OUTAGE_S)
    assert set(harness.client.failures) == {2}, "the other one was begun, and its client has tokens"


def test_what_only_an_executor_that_is_away_could_hold_waits_for_it_while_others_serve_the_model():
    harness = CoreHarness(make_executor(num_blocks=8), make_executor(incarnation=9))
    harness.lose(SECOND)
    large, small = make_request(100, 10, handle=1), make_request(handle=2)
    harness.submit(large, small)
    harness.pass_time(MAX_OUTAGE_S)
    assert set(harness.client.failures) == {1}
    harness.finish()
    harness.assert_whole(small)


def test_a_deadline_and_a_cancellation_end_a_request_that_waits_for_an_executor():
    harness = restarting()
    due, unwanted = make_request(deadline_s=20.0, handle=1), make_request(handle=2)
    harness.submit(due, unwanted)
    harness.cancel(unwanted)
    harness.pass_time(20.0)
    assert isinstance(harness.client.failures[1], DeadlineExceededError)
    assert 2 in harness.client.finishes
    assert harness.views.num_unfinished() == 0


def test_what_an_operator_drains_takes_nothing_new_and_what_waits_there_does_not_do_so_for_ever():
    """Whoever drains the last executor of a model wants its requests elsewhere; undone in time nobody notices."""
    harness = CoreHarness(make_executor())
    before = make_request(handle=1), replace(make_request(handle=2), max_outage_s=2.0)
    harness.submit(*before)
    harness.drain()
    with pytest.raises(NoExecutorError, match="draining") as refusal:
        harness.submit(make_request(handle=3))
    assert refusal.value.retry_after_s > 0
    harness.pass_time(2.0)
    assert set(harness.client.failures) == {2}
    harness.feed(UndrainExecutor(FIRST))
    harness.pass_time(MAX_OUTAGE_S)
    harness.finish()
    harness.assert_whole(before[0])


def test_an_executor_that_an_operator_drained_is_waited_for_once_it_restarts():
    harness = CoreHarness(make_executor())
    harness.drain()
    harness.lose()
    request = make_request()
    harness.submit(request)
    harness.executors[FIRST].restart()
    harness.attach()
    harness.finish()
    harness.assert_whole(request)


def test_an_estimate_says_that_no_executor_is_there():
    """When one comes nobody can tell."""
    harness = restarting()
    assert isinstance(harness.views.estimate(make_request(), 0.0).refusal, NoExecutorError)

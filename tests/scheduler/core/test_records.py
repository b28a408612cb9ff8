"""Records on executors: what stays there of a request that is over, and when it is forgotten."""

from dataclasses import replace

from both_sides.audited import make_executor
from both_sides.harness import CoreHarness, preempted_rows
from paceline.plan.values import FinishReason, RowFinish
from paceline_scheduler.core.events import Acknowledge, ExecutorAttached, StreamEnded
from paceline_scheduler.testing.requests import column, make_request


def run_until_ended(harness, handle):
    """Go on until the client has heard the end."""
    while handle not in harness.client.ended:
        harness.step()


def preempt_one(harness):
    """Two requests that outgrow the pool; returns the one whose release was planned and not confirmed yet."""
    requests = {row: make_request(8, 12) for row in range(2)}
    harness.expect_short_outputs()
    harness.submit(*requests.values())
    while not (preempted := preempted_rows(harness.plan())):
        harness.run()
        harness.complete()
    return requests[preempted[0]]


def test_the_record_of_an_end_is_kept_until_it_is_acknowledged():
    executor = make_executor()
    harness = CoreHarness(executor)
    request = make_request(4, 2)
    harness.submit(request)
    harness.finish()
    assert request.key in executor.records
    harness.acknowledge(request)
    harness.finish()
    assert request.key not in executor.records


def test_a_client_may_acknowledge_an_end_before_the_row_is_free():
    executor = make_executor()
    harness = CoreHarness(executor)
    request = make_request(4, 2)
    harness.submit(request)
    run_until_ended(harness, request.handle)
    harness.acknowledge(request)
    assert executor.rows, "the row is still there"
    harness.finish()
    assert request.key not in executor.records


def test_acknowledging_what_still_runs_changes_nothing():
    executor = make_executor()
    harness = CoreHarness(executor)
    request = make_request(4, 8)
    harness.submit(request)
    harness.step()
    harness.acknowledge(request)
    harness.finish()
    harness.assert_whole(request)
    assert request.key in executor.records


def test_what_an_executor_still_holds_for_nobody_is_forgotten():
    executor = make_executor(num_blocks=6)
    harness = CoreHarness(executor)
    request = preempt_one(harness)
    harness.run("executor-0")
    ended = make_request(2, 1)
    successor = CoreHarness(executor)
    assert not executor.records[request.key].released
    successor.submit(ended)
    successor.finish()
    assert executor.records.keys() == {ended.key, *(key for key in executor.records if executor.records[key].released)}
    successor.feed(Acknowledge((ended.key,)))
    successor.attach("executor-0")
    successor.finish()
    assert ended.key not in executor.records


def test_an_end_that_nobody_heard_of_beats_being_taken_off_the_row():
    request = make_request(5, 3)
    harness = CoreHarness(make_executor())
    harness.submit(request)
    harness.step()
    harness.run_ahead(2)
    harness.feed(StreamEnded("executor-0"))
    harness.results["executor-0"].clear()
    description, snapshot = harness.executors["executor-0"].attach("executor-0")
    (seen,) = snapshot.rows
    assert seen.finish is RowFinish.LENGTH
    record = replace(seen, row=None, block_ids=column(), num_computed_tokens=0)
    harness.feed(ExecutorAttached(description, replace(snapshot, rows=(record,))))

    harness.assert_whole(request)
    assert harness.client.finishes[request.handle].reason is FinishReason.LENGTH
    assert harness.views.num_unfinished() == 0
    assert harness.views.num_waiting() == (0, 0)

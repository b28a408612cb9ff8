"""A request that ended on the device while it was being taken off its row: its end is in the record, and counts."""

from dataclasses import replace

from both_sides.audited import expected_output, make_executor
from both_sides.harness import CoreHarness
from paceline.plan.values import FinishReason, RowFinish
from paceline_scheduler.core.events import ExecutorAttached, StreamEnded
from paceline_scheduler.testing.requests import column, make_request


def test_an_end_that_nobody_heard_of_beats_being_taken_off_the_row():
    request = make_request(5, 3)
    harness = CoreHarness(make_executor())
    harness.submit(request)
    harness.step()
    for _ in range(2):
        harness.plan()
        harness.run()
    harness.feed(StreamEnded("executor-0"))
    harness.results["executor-0"].clear()
    description, snapshot = harness.executors["executor-0"].attach("executor-0")
    (seen,) = snapshot.rows
    assert seen.finish is RowFinish.LENGTH
    record = replace(seen, row=None, block_ids=column(), num_computed_tokens=0)
    harness.feed(ExecutorAttached(description, replace(snapshot, rows=(record,))))

    assert tuple(harness.client.token_ids[request.handle]) == expected_output(request)
    assert harness.client.finishes[request.handle].reason is FinishReason.LENGTH
    assert harness.views.num_unfinished() == 0
    assert harness.views.num_waiting() == (0, 0)

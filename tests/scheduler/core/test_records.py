"""Records on executors: what stays there of a request that is over, and what an attach takes up of one that runs."""

from dataclasses import replace

import numpy as np
import pytest

from both_sides.audited import expected_logprobs, expected_output, make_executor
from both_sides.harness import CoreHarness, preempted_rows
from paceline.plan.values import FinishReason, LogprobColumns, RowFinish
from paceline_scheduler.core.events import Acknowledge, ExecutorAttached, StreamEnded
from paceline_scheduler.errors import DuplicateRequestError
from scheduler_rig.requests import column, make_request


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


@pytest.mark.parametrize("is_broken", [False, True], ids=["quiet", "broken stream"])
def test_a_request_id_can_be_used_again_as_soon_as_its_end_was_told(is_broken):
    harness = CoreHarness(make_executor())
    old, new = make_request(4, 2, request_id="x"), make_request(5, 3, request_id="x")
    harness.submit(old)
    with pytest.raises(DuplicateRequestError):
        harness.submit(make_request(request_id="x"))
    run_until_ended(harness, old.handle)
    harness.submit(new)
    if is_broken:
        harness.attach()
    harness.finish()
    harness.assert_whole(new, old)


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


# An attach takes up what the snapshot shows: tokens come with their log-probabilities, whatever the stream lost


NUM_TOKENS = 12


def asking(num_logprobs=2, **options):
    """A request for 12 tokens with log-probabilities."""
    return make_request(5, NUM_TOKENS, handle=1, num_logprobs=num_logprobs, **options)


def running(request, *executors):
    """The first token is delivered; two more steps ran, and their results are on their way."""
    harness = CoreHarness(*(executors or (make_executor(),)))
    harness.submit(request)
    harness.step()
    harness.run_ahead(2)
    return harness


def attach_with(harness, **changes):
    """Break the stream and attach again, with another state of the one row in the snapshot."""
    harness.feed(StreamEnded("executor-0"))
    harness.results["executor-0"].clear()
    description, snapshot = harness.executors["executor-0"].attach("executor-0")
    row = replace(snapshot.rows[0], **changes)
    harness.feed(ExecutorAttached(description, replace(snapshot, rows=(row,))))


def assert_aligned(harness, request):
    """Every token of the output was delivered once, and its log-probabilities with it."""
    told = expected_output(request)
    assert tuple(harness.client.token_ids[1]) == told
    assert harness.client.logprobs[1] == expected_logprobs(told, request.num_logprobs)


@pytest.mark.parametrize("num_logprobs", [0, 2, 20])
def test_tokens_from_the_snapshot_come_with_their_logprobs(num_logprobs):
    request = asking(num_logprobs)
    harness = running(request)
    harness.break_stream()

    assert len(harness.client.token_ids[1]) == len(harness.client.logprobs[1]) == 3
    harness.finish()
    assert_aligned(harness, request)


def test_a_request_that_ended_unheard_is_delivered_with_its_logprobs():
    request = asking()
    harness = running(request)
    while harness.executors["executor-0"].rows[0].finish is RowFinish.GOES_ON:
        harness.complete()
        harness.run_ahead()
    harness.attach()

    assert 1 in harness.client.finishes
    assert_aligned(harness, request)


def test_logprobs_count_from_the_output_of_an_earlier_attempt():
    request = asking()
    harness = running(request, make_executor(), make_executor(incarnation=2))
    harness.lose()
    harness.results["executor-0"].clear()
    harness.step("executor-1")
    harness.run_ahead(2, "executor-1")
    harness.attach("executor-1")

    (seen,) = harness.executors["executor-1"].snapshot().rows
    assert (seen.logprobs.offset, len(seen.logprobs.logprobs)) == (1, 3)
    harness.finish()
    assert_aligned(harness, request)
    assert harness.client.attempts[1] == 2


NONE = LogprobColumns(0, np.zeros(0, np.float32), column().reshape(0, 2), np.zeros((0, 2), np.float32))


@pytest.mark.parametrize("logprobs", [None, NONE, replace(NONE, offset=3)], ids=["none", "too few", "too late"])
def test_a_row_whose_logprobs_do_not_reach_back_is_computed_anew(logprobs):
    """Tokens without what was asked for would shift all that follow."""
    request = asking()
    harness = running(request)
    attach_with(harness, logprobs=logprobs)

    assert len(harness.client.token_ids[1]) == 1
    harness.finish()
    assert_aligned(harness, request)
    assert harness.client.attempts[1] == 2


def test_a_row_without_logprobs_is_taken_up_if_nobody_asked():
    request = make_request(5, NUM_TOKENS, handle=1)
    harness = running(request)
    harness.attach()
    harness.finish()

    harness.assert_whole(request)
    assert (harness.client.logprobs, harness.client.attempts[1]) == ({}, 1)


def test_a_row_that_has_nothing_new_needs_no_logprobs():
    """Everything it could tell has been told."""
    request = asking()
    harness = running(request)
    for _ in range(2):
        harness.complete()
    attach_with(harness, logprobs=None)

    assert harness.views.executor("executor-0").ledger.rows.num_running == 1

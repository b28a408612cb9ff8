"""An attach takes up what the snapshot shows: tokens come with their log-probabilities, whatever the stream lost."""

from dataclasses import replace

import numpy as np
import pytest

from both_sides.audited import expected_logprobs, expected_output, make_executor
from both_sides.harness import CoreHarness
from paceline.plan.values import LogprobColumns, RowFinish
from paceline_scheduler.core.events import ExecutorAttached, StreamEnded
from paceline_scheduler.testing.requests import column, make_request

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

    assert harness.views.executor("executor-0").rows.num_running == 1

"""Submission, ends and returns: what is refused, what is delivered, what survives a broken stream."""

import pytest

from both_sides.audited import make_executor
from both_sides.harness import CoreHarness, running
from paceline.plan.values import FinishReason
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    QueueFullError,
)
from paceline_scheduler.testing.requests import make_request


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "field"),
    [(16, None, "prompt"), (17, 1, "prompt"), (10, 7, "stopping.max_tokens"), (10, 2**31 - 1, "stopping.max_tokens")],
)
def test_what_can_never_fit_the_context_is_refused(num_prompt, max_tokens, field):
    harness = CoreHarness(make_executor(max_model_len=16))
    with pytest.raises(InvalidRequestError) as refusal:
        harness.submit(make_request(num_prompt, max_tokens))
    assert refusal.value.field == field
    assert harness.views.num_waiting() == (0, 0)


def test_what_can_never_fit_the_pool_is_refused():
    """Four blocks of four hold 16 computed tokens: a prompt of 10 can get 7 more, the last of which is not computed."""
    harness = CoreHarness(make_executor(num_blocks=4))
    with pytest.raises(InvalidRequestError, match="at most 7 fit"):
        harness.submit(make_request(10, 8))
    request = make_request(10, 7)
    harness.submit(request)
    harness.finish()
    harness.assert_whole(request)


def test_a_full_queue_refuses_with_a_time_to_try_again():
    harness = CoreHarness(make_executor(), limits=CoreLimits(max_num_queued_reqs=2, max_num_queued_tokens=10))
    harness.submit(make_request(4, handle=1))
    with pytest.raises(QueueFullError, match="tokens"):
        harness.submit(make_request(7))
    harness.submit(make_request(4, handle=2))
    with pytest.raises(QueueFullError, match="requests") as refusal:
        harness.submit(make_request(1))
    assert 0 < refusal.value.retry_after_s <= 30
    harness.finish()
    assert harness.client.ended == {1, 2}


def test_a_stop_text_cuts_the_record():
    """The edge found a stop text at token 2 while token 3 was on its way: the executor's record ends at 2."""
    executor = make_executor()
    harness = CoreHarness(executor)
    request = make_request(3, 50, handle=1)
    harness.submit(request)
    harness.steps(3)
    harness.end(request, 2)
    harness.finish()
    record = executor.records[request.key]
    assert record.released.num_output_tokens == 2
    assert record.released.reason == FinishReason.STOP
    assert 1 not in harness.client.ended, "the edge knows already"


def test_a_deadline_that_passes_fails_the_request_wherever_it_is():
    """Running or waiting: one failure, nothing later, blocks free."""
    harness = running(
        make_request(3, 50, handle=1, deadline_s=5.0),
        make_request(3, 50, handle=2, deadline_s=6.0),
        on=make_executor(max_num_rows=1),
    )
    assert harness.wake_at == 5.0
    harness.pass_time(7)
    assert {type(error) for error in harness.client.failures.values()} == {DeadlineExceededError}
    harness.finish()
    assert harness.client.ended == {1, 2}
    assert harness.wake_at is None
    assert harness.views.counts("executor-0").blocks.used == 0


# Cancelling gives blocks back at once, wherever a request stands


def num_used_blocks(harness):
    return harness.views.counts("executor-0").blocks.used


@pytest.mark.parametrize("num_steps", range(12))
@pytest.mark.parametrize("in_flight", [0, 1, 2])
def test_blocks_are_back_within_two_steps_of_a_cancel(num_steps, in_flight):
    harness = CoreHarness(make_executor(max_num_batched_tokens=8))
    request = make_request(20, 10, bypass_prefix_cache=True)
    harness.submit(request)
    harness.steps(num_steps)
    for _ in range(in_flight):
        harness.plan()
    harness.cancel(request)
    for _ in range(in_flight):
        harness.run()
        harness.complete()
    harness.steps(2)
    assert num_used_blocks(harness) == 0
    assert harness.client.finishes[request.handle].reason == FinishReason.CANCELLED
    assert harness.plan() is None
    harness.views.check()

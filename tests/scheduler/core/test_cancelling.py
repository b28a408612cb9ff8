"""Cancelling gives blocks back at once, wherever a request stands."""

import pytest

from both_sides.audited import make_executor
from both_sides.harness import CoreHarness
from paceline.plan.values import FinishReason
from paceline_scheduler.core.events import Cancel
from paceline_scheduler.testing.requests import make_request


def used_blocks(harness):
    """Return how many blocks belong to requests."""
    return harness.views.counts("executor-0").blocks.used


@pytest.mark.parametrize("num_steps", range(12))
@pytest.mark.parametrize("in_flight", [0, 1, 2])
def test_blocks_are_back_within_two_steps_of_a_cancel(num_steps, in_flight):
    harness = CoreHarness(make_executor(max_num_batched_tokens=8))
    request = make_request(20, 10, bypass_prefix_cache=True)
    harness.submit(request)
    for _ in range(num_steps):
        harness.step()
    for _ in range(in_flight):
        harness.plan()
    harness.feed(Cancel(request.key))
    for _ in range(in_flight):
        harness.run()
        harness.complete()
    for _ in range(2):
        harness.step()
    assert used_blocks(harness) == 0
    assert harness.client.finishes[request.handle].reason == FinishReason.CANCELLED
    assert harness.plan() is None
    harness.views.check()


def test_a_preempted_request_is_cancelled_before_it_has_left_its_row():
    """Its release was planned and not confirmed: it does not come back."""
    harness = CoreHarness(make_executor(num_blocks=8))
    harness.expect_short_outputs()
    requests = [make_request(8, 20), make_request(8, 20)]
    harness.submit(*requests)
    harness.step()
    while True:
        plan = harness.plan()
        if any(release.final is None for release in plan.releases):
            break
        harness.run()
        harness.complete()
    harness.feed(Cancel(requests[1].key))
    harness.finish()
    assert harness.client.finishes[requests[1].handle].reason == FinishReason.CANCELLED
    assert used_blocks(harness) == 0
    assert harness.views.num_waiting() == (0, 0)

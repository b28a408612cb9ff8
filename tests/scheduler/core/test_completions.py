"""Several completions of one prompt: it is computed once, and what is shared is copied before it is written to."""

from dataclasses import replace

import pytest

from both_sides.audited import make_executor
from both_sides.harness import CoreHarness, running
from paceline.plan.values import RecordId
from paceline_scheduler.core.limits import CoreLimits
from scheduler_rig.requests import make_request


def completions(prompt, max_tokens, count, **options):
    """Return the completions of one request, each with a seed of its own."""
    return [
        replace(
            make_request(prompt, max_tokens, handle=index + 1, **options),
            key=RecordId("", "request", index),
            num_completions=2,
        )
        for index in range(count)
    ]


@pytest.mark.parametrize("length", [2, 3, 4, 5, 7, 8, 9, 16])
def test_the_prompt_is_computed_once(length):
    """Blocks of 4: whole blocks are shared, the rest is copied; each further completion computes one token."""
    requests = completions(list(range(1, length + 1)), 6, 3)
    harness = running(*requests, steps=0)
    first, second = harness.step(), harness.step()
    assert [placement.request.handle for placement in first.new_requests] == [1]
    assert [placement.num_cached_tokens for placement in second.new_requests] == [length - 1] * 2
    harness.finish()
    harness.assert_whole(*requests)


def test_a_partly_filled_block_is_copied_for_each_completion():
    """Nobody writes to a block that another one reads."""
    harness = running(*completions(list(range(6)), 6, 4))
    plan = harness.step()
    assert len(plan.copies.sources) == 3
    assert len(set(plan.copies.sources.tolist())) == 1
    assert set(plan.copies.destinations.tolist()) <= set(plan.grants.block_ids.tolist())
    harness.views.check()


def test_others_are_not_held_up_by_completions_that_wait_for_their_prompt():
    harness = running(*completions(list(range(6)), 6, 3), make_request(3, 2, handle=9), steps=0)
    assert [placement.request.handle for placement in harness.step().new_requests] == [1, 9]


def test_a_completion_that_was_preempted_starts_behind_the_prompt_again():
    harness = CoreHarness(make_executor(num_blocks=12))
    harness.expect_short_outputs()
    requests = completions(list(range(9)), 24, 2)
    harness.submit(*requests)
    placements = []
    while (plan := harness.step()) is not None:
        placements += plan.new_requests
        harness.views.check()
    again = [placement for placement in placements if placement.attempt > 1]
    assert again
    assert all(placement.num_cached_tokens >= 8 for placement in again)
    harness.assert_whole(*requests)


def test_without_the_prefix_cache_every_completion_computes_the_prompt():
    """A request that keeps out of the cache shares nothing, not even with itself."""
    harness = running(*completions(list(range(6)), 2, 3, bypass_prefix_cache=True), steps=0)
    plan = harness.step()
    assert [placement.num_cached_tokens for placement in plan.new_requests] == [0, 0, 0]


def test_completions_go_on_when_the_first_one_has_ended():
    """Its blocks are cached by then: whole blocks are hit, there is nothing left to copy from."""
    requests = completions(list(range(6)), 3, 3)
    harness = running(*requests, on=make_executor(max_num_rows=1), steps=0)
    harness.finish()
    harness.assert_whole(*requests)
    assert [harness.client.finishes[h].num_cached_tokens for h in (1, 2, 3)] == [0, 4, 4]


def test_completions_are_weighed_as_what_they_cost():
    """On an idle system 16 completions of a long prompt are taken like one: the prompt is computed once."""
    harness = CoreHarness(make_executor(num_blocks=256, max_num_rows=32), limits=CoreLimits(ttft_budget_s=0.1))
    harness.submit(*completions(list(range(200)), 2, 16))
    assert harness.views.num_waiting() == (16, 200 + 15)
    harness.finish()
    assert len(harness.client.ended) == 16

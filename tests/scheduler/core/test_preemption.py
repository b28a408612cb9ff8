"""A pool that is full: who gives way, how often, and that nobody is stuck."""

import numpy as np

from both_sides.audited import make_executor
from both_sides.harness import CoreHarness, preempted_rows, running
from paceline_scheduler.core.planning.capacity import MAX_PREEMPTIONS
from paceline_scheduler.core.planning.growth import Growth, OutputLengths
from scheduler_rig.requests import make_request


def test_no_request_is_preempted_more_than_three_times():
    """A pool far too small for what the core believes it can hold: everyone still ends, with the right tokens."""
    requests = [make_request(3 + index % 5, 24 + index, handle=index + 1) for index in range(24)]
    harness = running(*requests, on=make_executor(num_blocks=14, max_num_rows=8), steps=0)
    preempted = set()
    while len(harness.client.ended) < len(requests):
        harness.expect_short_outputs()
        plan = harness.plan()
        if plan is not None:
            rows = harness.views.executor("executor-0").ledger.rows
            preempted |= {rows.live[row] for row in preempted_rows(plan)}
        harness.run()
        harness.complete()
        harness.views.check()
    harness.assert_whole(*requests)
    assert max(live.preemptions.count for live in preempted) == MAX_PREEMPTIONS


def test_a_request_that_was_preempted_often_gets_blocks_for_its_whole_length():
    """After the third time it is placed with all the blocks it can ever need, and nobody can take them."""
    request = make_request(4, 20, handle=1)
    harness = running(request, on=make_executor(num_blocks=8), steps=0)
    next(iter(harness.views.waiting_requests())).preemptions.count = MAX_PREEMPTIONS
    plan = harness.step()
    assert len(plan.grants.rows) == 6, "23 slots"
    harness.finish()
    harness.assert_whole(request)


def test_of_two_that_cannot_be_preempted_again_only_one_runs_without_blocks_for_its_whole_length():
    """Two of them could wait for each other's blocks for ever; what may be preempted runs beside the one."""
    harness = CoreHarness(make_executor(num_blocks=8))
    harness.expect_short_outputs()
    requests = [make_request(4, 27, handle=handle) for handle in (1, 2, 3, 4)]
    harness.submit(requests[0])
    harness.step()
    harness.submit(*requests[1:])
    for live in harness.views.waiting_requests()[:2]:
        live.preemptions.count = MAX_PREEMPTIONS
    assert [placement.request.handle for placement in harness.step().new_requests] == [2, 4]
    harness.finish()
    harness.assert_whole(*requests)


def test_what_is_expected_to_outgrow_the_pool_waits_instead_of_being_preempted():
    """64 slots: after outputs of 40 tokens were seen, a second request that may get as long is not begun beside one."""
    harness = CoreHarness(make_executor(num_blocks=16))
    for _ in range(100):
        harness.views.executor("executor-0").output_lengths.observe(40)
    harness.submit(make_request(8, 40, handle=1), make_request(8, 40, handle=2))
    plans = []
    while (plan := harness.step()) is not None:
        plans.append(plan)
    assert not any(preempted_rows(plan) for plan in plans)
    assert harness.client.ended == {1, 2}


def test_growth_admits_exactly_what_fits_at_the_worst_moment():
    """Equal to playing the future out: all grow by a slot a step, and each gives its slots back after its last one."""
    chance = np.random.default_rng(7)
    for _ in range(300):
        block_size, num_slots = int(chance.integers(1, 5)), int(chance.integers(8, 80))
        held, rest = chance.integers(1, 20, 4), chance.integers(1, 20, 4)
        growth = Growth(num_slots, block_size, held[:3], rest[:3])
        # The last token of each needs no slot, and a block may be needed for one slot of it.
        rounded = held - 1 + block_size - 1
        needed = [sum(h + t for h, r in zip(rounded, rest, strict=True) if t <= r) for t in range(1, 20)]
        assert growth.has_room_for(int(held[3]), int(rest[3])) == (max(needed) <= num_slots)


def test_output_lengths_follow_what_is_seen():
    """After a hundred outputs of 20 tokens, that is what is expected of a new one; an outlived guess is extended."""
    lengths = OutputLengths()
    for _ in range(200):
        lengths.observe(20)
    rest = lengths.expected_rest(np.array([0, 15, 100]), np.array([500, 500, 500]))
    assert 20 <= rest[0] <= 22
    assert rest[1] == rest[0] - 15
    assert rest[2] >= 1
    assert lengths.expected_rest(np.array([0]), np.array([7])).tolist() == [7]


def test_a_preemption_that_never_ran_does_not_count():
    """The stream breaks before the plan runs, again and again: nobody is protected for nothing, and both end."""
    harness = CoreHarness(make_executor(num_blocks=8))
    harness.expect_short_outputs()
    requests = [make_request(4, 20, handle=handle) for handle in (1, 2)]
    harness.submit(*requests)
    harness.step()
    for _ in range(100):
        plan = harness.plan()
        if plan is not None and preempted_rows(plan):
            harness.break_stream(drops_plans=True)
            assert all(harness.explain(request).num_preemptions == 0 for request in requests)
            break
        harness.run()
        harness.complete()
    harness.finish()
    harness.assert_whole(*requests)

"""Steps that verify drafts: what is planned of a row is an upper bound, and results settle it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from both_sides.audited import drawn_acceptance, ending, expected_logprobs, expected_output, make_executor
from both_sides.harness import CoreHarness
from paceline.plan.values import StepPoint
from paceline_scheduler.core.events import StepFinished
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.errors import DivergenceError
from scheduler_rig.requests import column, make_request

FIRST = "executor-0"
MAX_DRAFTS = 9


def drafting(num_drafts, num_accepted, *requests, **options):
    """A harness whose rows want drafts, with one result in of requests whose prompts are computed."""

    def acceptance(num_drafts):
        return min(num_accepted, num_drafts + 1)

    executor = make_executor(max_num_drafts=MAX_DRAFTS, acceptance=acceptance, **options)
    harness = CoreHarness(executor)
    harness.submit(*requests)
    harness.step()
    harness.drafts = (num_drafts,)
    return harness


def scheduled(plan):
    """Return {row: (tokens, drafts among them)} of a plan."""
    drafts = plan.num_draft_tokens.tolist() or [0] * len(plan.rows)
    return dict(zip(plan.rows.tolist(), zip(plan.num_scheduled_tokens.tolist(), drafts, strict=True), strict=True))


def granted(plan):
    """Return the (row, index) of the blocks that a plan grants."""
    return list(zip(plan.grants.rows.tolist(), plan.grants.indices.tolist(), strict=True))


def planned_of_row_0(harness):
    """Return the bound of row 0, and what it was planned to be after each step in flight."""
    executor = harness.views.executor(FIRST)
    return int(executor.ledger.rows.num_scheduled[0]), [
        step.num_scheduled_after.tolist() for step in executor.in_flight
    ]


def test_without_drafts_a_plan_has_no_column_for_them():
    """The steady state costs nothing more."""
    harness = drafting(0, 1, make_request(3, 9))
    assert len(harness.plan().num_draft_tokens) == 0


def test_what_a_step_that_fails_was_to_compute_is_told_as_lowered():
    """Suspicion goes by it: the row is above it when it has got beyond."""
    request = make_request(3, 30)
    harness = drafting(3, 1, request)
    harness.plan()
    harness.run_ahead()
    harness.complete()
    (step,) = harness.views.executor(FIRST).unanswered_steps()
    assert [(live.request.handle, position) for live, position in step.positions] == [(request.handle, 8)]


def test_blocks_granted_for_refused_drafts_serve_the_next_tokens():
    """Two blocks of 4 for positions 3 to 10; afterwards none is needed before position 12."""
    harness = drafting(7, 1, make_request(3, 30))
    assert granted(harness.step()) == [(0, 1), (0, 2)]
    harness.drafts = (0,)
    assert [granted(harness.step()) for _ in range(9)] == [[]] * 8 + [[(0, 3)]]


def test_drafts_cost_nobody_a_block():
    """Four blocks are spare, of which two stay for the rows' next tokens. The others go to the first row; the second
    drafts as far as its own block reaches.
    """
    harness = CoreHarness(make_executor(num_blocks=6))
    harness.expect_short_outputs()
    harness.submit(make_request(3, 12), make_request(2, 12))
    harness.step()
    harness.drafts = (8,)
    plan = harness.plan()
    assert granted(plan) == [(0, 1), (0, 2)]
    assert scheduled(plan) == {0: (9, 8), 1: (2, 1)}


def test_a_plan_that_preempts_has_no_drafts():
    """Four blocks are full: the second row goes, and the first takes one of its two blocks, for its one token."""
    harness = CoreHarness(make_executor(num_blocks=4))
    harness.expect_short_outputs()
    harness.submit(make_request(3, 12), make_request(3, 12))
    harness.steps(6)
    harness.drafts = (8,)
    plan = harness.plan()
    assert [release.row for release in plan.releases] == [1]
    assert granted(plan) == [(0, 2)]
    assert scheduled(plan) == {0: (1, 0)}


def test_no_draft_follows_tokens_that_are_known_and_computed_once_more():
    """Of 9 known tokens a row kept the first block: 4 to 7 come one by one, then the last one and drafts."""
    request = make_request(3, 20)
    harness = drafting(0, 1, request)
    harness.steps(5)
    executor = harness.executors[FIRST]
    executor.table._block_tables.cut_before(executor.rows[0].block_ids[1:])
    harness.attach()
    harness.drafts = (3,)
    assert [scheduled(harness.step()) for _ in range(5)] == [{0: (1, 0)}] * 4 + [{0: (4, 3)}]
    harness.finish()
    harness.assert_whole(request)


def test_drafts_take_what_the_token_bound_leaves():
    """Of 8 tokens two rows take one each, and 6 are drafts."""
    harness = drafting(4, 1, make_request(3, 20), make_request(3, 20), max_num_batched_tokens=8)
    assert scheduled(harness.plan()) == {0: (5, 4), 1: (3, 2)}


def test_there_are_no_drafts_beside_a_prompt():
    harness = drafting(4, 1, make_request(3, 20), make_request(3, 20), max_num_batched_tokens=24)
    harness.submit(make_request(40, 2))
    assert [scheduled(harness.step()) for _ in range(3)] == [
        {0: (1, 0), 1: (1, 0), 2: (22, 0)},
        {0: (1, 0), 1: (1, 0), 2: (18, 0)},
        {0: (5, 4), 1: (5, 4), 2: (1, 0)},
    ]


def test_no_drafts_are_taken_where_a_step_would_take_too_long():
    """With drafts a step may take a tenth of a second, as with a prompt."""
    points = (StepPoint(1, 30_000_000), StepPoint(64, 64 * 30_000_000))
    harness = drafting(4, 1, make_request(3, 20), step_points=points)
    assert scheduled(harness.plan()) == {0: (1, 0)}


@pytest.mark.parametrize(
    "change",
    [
        {"num_accepted": column(6, 2), "token_ids": column(*range(8))},
        {"num_accepted": column(9, -1), "token_ids": column(*range(8))},
        {"num_draft_tokens": column(5, 4)},
        {"num_draft_tokens": column(-1, 4)},
        {"num_draft_tokens": column(4)},
    ],
)
def test_a_result_with_more_than_was_planned_changes_nothing(change):
    requests = make_request(3, 20), make_request(3, 20)
    harness = drafting(4, 2, *requests)
    harness.run_ahead()
    result = harness.results[FIRST][0]
    before = planned_of_row_0(harness)
    with pytest.raises(DivergenceError):
        harness.feed(StepFinished(FIRST, replace(result, **change)))
    assert planned_of_row_0(harness) == before
    harness.finish()
    harness.assert_whole(*requests)


def test_drafts_that_were_not_verified_do_not_count_as_computed():
    """The executor found none: the step was one of a single token, at position 3."""
    harness = drafting(4, 1, make_request(3, 20))
    harness.run_ahead()
    executor, observed = harness.views.executor(FIRST), []
    executor.step_time.observe = lambda *step: observed.append(step[:2])
    harness.results[FIRST][0] = replace(harness.results[FIRST][0], num_draft_tokens=column())
    harness.complete()
    assert observed == [(1, 4)]


def test_steps_are_learnt_from_at_the_positions_that_they_had():
    """The second step began at position 5, not 8; its 5 tokens saw 6 to 10 others."""
    harness = drafting(4, 2, make_request(3, 20))
    harness.run_ahead(2)
    executor, observed = harness.views.executor(FIRST), []
    executor.step_time.observe = lambda *step: observed.append(step[:2])
    harness.complete()
    harness.complete()
    assert observed == [(5, 4 + 5 + 6 + 7 + 8), (5, 6 + 7 + 8 + 9 + 10)]


def test_rows_that_had_ended_when_a_step_began_do_not_count_as_computed():
    ends, goes_on = make_request(3, 20, end_token_ids=(0,)), make_request(3, 20)
    executor = make_executor(end_probability=1.0)
    harness = CoreHarness(executor)
    harness.submit(ends, goes_on)
    steps = [harness.plan() for _ in range(3)]
    assert [plan.num_tokens for plan in steps[1:]] == [2, 2]
    for _ in steps:
        harness.run()
    harness.complete()
    observed = []
    harness.views.executor(FIRST).step_time.observe = lambda *step: observed.append(step[:2])
    harness.complete()
    harness.complete()
    assert observed == [(1, 4), (1, 5)]


@given(
    shapes=st.lists(st.tuples(st.integers(1, 14), st.integers(1, 24)), min_size=1, max_size=6),
    drafts=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(10, 24),
    num_ahead=st.integers(1, 4),
    end_probability=st.sampled_from((0.0, 0.1)),
)
def test_output_and_log_probabilities_are_those_of_plain_decoding(
    shapes, drafts, seed, num_blocks, num_ahead, end_probability
):
    requests = [make_request(*shape, end_token_ids=(0,), num_logprobs=1) for shape in shapes]
    executor = make_executor(
        num_blocks=num_blocks,
        end_probability=end_probability,
        acceptance=drawn_acceptance(seed),
        max_num_rows=4,
        max_num_drafts=MAX_DRAFTS,
    )
    harness = CoreHarness(executor, limits=CoreLimits(run_ahead_s=1e9))
    harness.drafts = drafts
    harness.expect_short_outputs()
    harness.submit(*requests)
    while harness.views.num_unfinished():
        for _ in range(num_ahead):
            harness.plan()
        harness.run()
        harness.complete()
    for request in requests:
        output = expected_output(request, ending(end_probability))
        assert tuple(harness.client.token_ids[request.handle]) == output
        assert harness.client.logprobs[request.handle] == expected_logprobs(output, 1)

"""What a step holds: decodes first, prefill in chunks, admission of what fits, preemption of the newest."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from both_sides.audited import expected_output, make_executor
from both_sides.harness import CoreHarness, running, scheduled
from paceline.plan.values import GraphSizes, StepPoint
from paceline.v1 import inference_pb2
from paceline_scheduler.core.events import SetLimits, StepFinished
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.planning.step_budget import MIN_CHUNK, StepBudget
from paceline_scheduler.core.planning.step_time import StepTimeModel, num_chunk_pairs
from scheduler_rig.requests import make_request


def test_a_long_prompt_is_computed_in_chunks_beside_running_decodes():
    harness = running(make_request(3, 10, handle=1), on=make_executor(max_num_batched_tokens=8))
    harness.submit(make_request(20, 2, handle=2))
    assert [scheduled(harness.step()) for _ in range(3)] == [{0: 1, 1: 7}, {0: 1, 1: 7}, {0: 1, 1: 6}]


@pytest.mark.parametrize(("run_ahead_s", "num_plans"), [(0.0, 2), (0.0001, 2), (0.025, 4), (1e9, 4)])
def test_short_steps_are_planned_further_ahead_as_far_as_the_executor_takes_it(run_ahead_s, num_plans):
    """Two plans whatever they take, more only while those unanswered are expected to be over soon."""
    harness = CoreHarness(make_executor(max_plans_in_flight=4), limits=CoreLimits(run_ahead_s=run_ahead_s))
    harness.submit(make_request(3, 9, handle=1))
    plans = [harness.plan() for _ in range(num_plans)]
    assert all(plan.predicted_ns < 6e6 for plan in plans[1:])
    assert [scheduled(plan) for plan in plans] == [{0: 3}] + [{0: 1}] * (num_plans - 1)
    assert harness.plan() is None


def test_no_token_is_planned_beyond_max_tokens():
    harness = running(make_request(3, 2, handle=1), steps=0)
    plans = [harness.step(), harness.step(), harness.step()]
    assert [plan.num_tokens for plan in plans] == [3, 1, 0]
    assert plans[2].releases[0].final.num_output_tokens == 2
    assert harness.plan() is None


def test_a_request_is_admitted_only_with_a_block_left_for_every_running_one():
    """8 blocks of 4: two running requests keep 2 blocks of headroom, so 13 tokens do not fit beside them."""
    harness = running(make_request(7, 3, handle=1), make_request(7, 3, handle=2), on=make_executor(num_blocks=8))
    harness.submit(make_request(13, 1, handle=3))
    assert scheduled(harness.step()) == {0: 1, 1: 1}
    assert harness.views.num_waiting() == (1, 13)
    harness.finish()
    assert harness.client.ended == {1, 2, 3}


def test_blocks_that_a_hit_takes_out_of_the_cache_are_not_granted_to_the_next_in_line():
    """8 blocks of 4, of which 4 are cached: the first request hits them all and needs one more, the second needs 4."""
    harness = CoreHarness(make_executor(num_blocks=8))
    cached = list(range(16))
    harness.submit(make_request(cached, 1, handle=1))
    harness.finish()
    harness.submit(make_request([*cached, 99], 1, handle=2), make_request(13, 1, handle=3))
    assert [placement.request.handle for placement in harness.step().new_requests] == [2]
    harness.finish()
    assert harness.client.ended == {1, 2, 3}


def test_the_head_of_the_queue_is_not_passed_over():
    """A small request behind a big one waits with it, else the big one might starve."""
    harness = running(make_request(15, 4, handle=1), on=make_executor(num_blocks=8))
    harness.submit(make_request(20, 1, handle=2), make_request(2, 1, handle=3))
    harness.step()
    assert harness.views.num_waiting()[0] == 2


def test_all_decodes_take_turns_when_a_step_is_too_small_for_them():
    """Five rows and two tokens a step: after twenty steps nobody is more than one turn ahead."""
    harness = running(*(make_request(1, 20, handle=handle) for handle in range(1, 6)))
    harness.feed(SetLimits(replace(harness.views.limits(), max_num_batched_tokens=2)))
    for _ in range(20):
        assert harness.step().num_tokens == 2
    turns = [len(tokens) for tokens in harness.client.token_ids.values()]
    assert len(turns) == 5
    assert max(turns) - min(turns) <= 1


def slow_executor():
    """Return an executor whose steps cost 10 ms and 10 ms per token."""
    points = (StepPoint(1, 20_000_000), StepPoint(64, 650_000_000))
    return make_executor(step_points=points)


def test_no_step_is_planned_above_half_a_second():
    """A prompt that would take 0.65 s is cut so that each step is predicted below the bound."""
    harness = CoreHarness(slow_executor())
    harness.submit(make_request(64, 1, handle=1))
    plans = [harness.step(), harness.step()]
    assert sum(plan.num_tokens for plan in plans) == 64
    assert all(0 < plan.predicted_ns <= 500_000_000 for plan in plans)


def test_decodes_that_take_longer_than_a_step_may_take_turns():
    """A device that became too slow for all of them: each step stays below the bound, and nobody is left out."""
    harness = running(
        *(make_request(1, 60, handle=handle) for handle in range(1, 65)),
        on=make_executor(max_num_rows=64, num_blocks=1024),
    )
    slow = (StepPoint(1, 290_000_000), StepPoint(64, 1_000_000_000))
    harness.views.executor("executor-0").step_time = StepTimeModel(slow)
    plans = []
    for _ in range(40):
        plans.append(harness.plan())
        harness.run()
        result = harness.results["executor-0"].popleft()
        timings = replace(result.timings, forward_ns=plans[-1].predicted_ns)
        harness.feed(StepFinished("executor-0", replace(result, timings=timings)))
    assert all(0 < plan.predicted_ns <= 500_000_000 for plan in plans)
    assert all(plan.num_tokens > 8 for plan in plans)
    turns = [len(tokens) for tokens in harness.client.token_ids.values()]
    assert len(turns) == 64
    assert max(turns) - min(turns) <= 1


def test_decodes_that_use_up_the_token_bound_leave_something_to_a_prompt():
    harness = running(*(make_request(1, 60, handle=handle) for handle in (1, 2, 3)))
    harness.submit(make_request(6, 3, handle=4))
    harness.step()
    harness.feed(SetLimits(replace(harness.views.limits(), max_num_batched_tokens=3)))
    harness.steps(20)
    assert harness.client.ended == {4}


def test_a_plan_is_bounded_in_bytes():
    """Prompts and contexts of one plan are one message: what does not fit waits for the next plan."""
    harness = CoreHarness(make_executor(max_num_rows=40))
    origin = inference_pb2.GenerateRequest(text="x" * (500 << 10)).SerializeToString()
    large = [replace(make_request(1, 1, handle=handle), origin=origin) for handle in range(1, 39)]
    harness.submit(*large)
    assert [len(harness.step().new_requests) for _ in range(3)] == [16, 16, 6]


def test_a_prompt_beside_decodes_keeps_steps_near_the_inter_token_target():
    harness = CoreHarness(slow_executor())
    harness.submit(make_request(2, 20, handle=1))
    harness.step()
    harness.submit(make_request(64, 1, handle=2))
    assert scheduled(harness.step()) == {0: 1, 1: 16}


@pytest.mark.parametrize(("decode_ms", "step_ms"), [(4, 25), (10, 50), (15, 75), (40, 100)])
def test_a_step_with_prompts_lasts_as_long_as_five_of_its_decodes_within_bounds(decode_ms, step_ms):
    """Decodes that are slow anyway leave prompts four fifths of the time; fast ones are held up by 25 ms at most."""
    points = (StepPoint(1, decode_ms * 1_000_000), StepPoint(257, (decode_ms + 256) * 1_000_000))
    executor = make_executor(step_points=points, max_num_batched_tokens=256)
    harness = running(make_request(2, 20, handle=1), on=executor)
    harness.submit(make_request(200, 1, handle=2))
    plan = harness.step()
    assert scheduled(plan)[0] == 1
    assert step_ms - 2 <= plan.predicted_ns / 1e6 <= step_ms


def test_a_prefix_is_computed_once():
    harness = CoreHarness(make_executor())
    prompt = list(range(12))
    harness.submit(make_request(prompt, 1, handle=1))
    harness.finish()
    harness.submit(make_request(prompt, 1, handle=2), make_request([*prompt, 50], 1, handle=3))
    plan = harness.step()
    assert scheduled(plan) == {0: 4, 1: 1}
    harness.finish()
    assert [harness.client.finishes[handle].num_cached_tokens for handle in (1, 2, 3)] == [0, 8, 12]


def test_a_prefix_is_shared_while_its_owner_runs():
    harness = running(make_request(list(range(9)), 30, handle=1))
    harness.submit(make_request(list(range(9)), 1, handle=2))
    plan = harness.step()
    assert plan.new_requests[0].num_cached_tokens == 8
    assert plan.shared.block_ids.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"tenant": "red"}, {"tenant": "blue"}),
        ({"cache_salt": "a"}, {"cache_salt": "b"}),
        ({"tenant": "ab", "cache_salt": "c"}, {"tenant": "a", "cache_salt": "bc"}),
        ({"bypass_prefix_cache": True}, {}),
        ({}, {"bypass_prefix_cache": True}),
    ],
)
def test_a_prefix_is_never_shared_across_these_borders(first, second):
    """I9: hits come from the same tenant and salt only, and only where both want the cache."""
    harness = running(make_request(list(range(12)), 1, handle=1, **first), steps=0)
    harness.finish()
    harness.submit(make_request(list(range(12)), 1, handle=2, **second))
    assert scheduled(harness.step()) == {0: 12}


def test_rows_are_reused_only_after_their_release_is_confirmed():
    """One row: the second request is placed when the result of the releasing plan has arrived."""
    harness = running(make_request(2, 1, handle=1), make_request(2, 1, handle=2), on=make_executor(max_num_rows=1))
    release = harness.plan()
    assert [r.row for r in release.releases] == [0]
    assert harness.plan() is None
    harness.run()
    harness.complete()
    assert len(harness.plan().new_requests) == 1


def test_step_times_are_learnt_from_results():
    model = StepTimeModel((StepPoint(1, 1_000_000), StepPoint(64, 2_000_000)))
    for step in range(200):
        num_tokens = 1 + step % 64
        model.observe(num_tokens, num_chunk_pairs(0, num_tokens), 4_000_000 + 50_000 * num_tokens)
    for num_tokens in (1, 32, 64):
        actual = 4_000_000 + 50_000 * num_tokens
        assert abs(model.predict_ns(num_tokens, num_chunk_pairs(0, num_tokens)) - actual) < actual / 10


def test_one_outlier_does_not_ruin_the_predictions():
    model = StepTimeModel((StepPoint(1, 1_000_000), StepPoint(64, 2_000_000)))
    before = model.predict_ns(8, 36)
    model.observe(8, 36, 60_000_000_000)
    assert model.predict_ns(8, 36) < 1.2 * before


def test_a_disturbed_warm_up_is_forgotten_as_soon_as_steps_tell_better():
    """It said 1 s for a token, as beside a busy neighbour; after eight steps nobody is refused for it."""
    model = StepTimeModel((StepPoint(1, 1_000_000_000), StepPoint(64, 1_000_000_000)))
    for _ in range(8):
        model.observe(4, 40, 20_000_000)
    assert model.predict_ns(4, 40) < 30_000_000


def test_executors_share_what_waits():
    """Two idle executors take half each, although one is asked first."""
    harness = CoreHarness(make_executor(), make_executor(incarnation=2))
    harness.submit(*(make_request(2, 5) for _ in range(6)))
    assert [len(harness.step(address).new_requests) for address in ("executor-0", "executor-1")] == [3, 3]


def test_limits_change_while_running():
    harness = CoreHarness(make_executor(), limits=CoreLimits(max_num_batched_tokens=8))
    harness.submit(make_request(20, 1, handle=1))
    assert harness.step().num_tokens == 8
    harness.feed(SetLimits(replace(harness.views.limits(), max_num_batched_tokens=3)))
    assert harness.step().num_tokens == 3


# Executors that capture steps: what a step holds comes to the size of a captured one, and nobody waits for it


SIZES = tuple(range(64, 1025, 64))
FAST = (StepPoint(1, 1_000_000), StepPoint(2048, 3_000_000))

sizes = st.sets(st.integers(1, 3000), max_size=20).map(lambda found: tuple(sorted(found)))
times = st.tuples(st.integers(1, 10**8), st.integers(0, 10**9)).map(
    lambda ns: (StepPoint(1, ns[0]), StepPoint(2048, ns[0] + ns[1]))
)
prompts = st.lists(st.tuples(st.integers(0, 4000), st.integers(1, 4000)), max_size=6)


def filled(points, sizes, num_decodes, chunks, max_num_tokens=2048):
    """A step's budget after decodes and then chunks (start, wanted), and how many tokens each of these got."""
    budget = StepBudget(StepTimeModel(points), CoreLimits(), max_num_tokens, sizes)
    budget.add_decodes(np.full(num_decodes, 100, np.int32), max_num_tokens)
    return budget, [budget.add_chunk(start, wanted) for start, wanted in chunks]


@given(times, sizes, st.integers(0, 300), prompts, st.integers(1, 2048))
def test_a_step_with_sizes_is_never_larger_nor_slower_than_one_without(points, sizes, num_decodes, chunks, most):
    """What fills a captured step is left out of a chunk, never added: all bounds hold as before."""
    with_sizes, counts = filled(points, sizes, num_decodes, chunks, most)
    without, free_counts = filled(points, (), num_decodes, chunks, most)

    assert all(count <= free for count, free in zip(counts, free_counts, strict=True))
    assert with_sizes.num_tokens <= min(without.num_tokens, most)
    assert with_sizes.predicted_ns() <= without.predicted_ns()


@given(times, sizes, st.integers(0, 300), prompts, st.integers(1, 2048))
def test_prompts_get_at_least_half_of_what_they_would_get(points, sizes, num_decodes, chunks, most):
    counts = sum(filled(points, sizes, num_decodes, chunks, most)[1])
    free = sum(filled(points, (), num_decodes, chunks, most)[1])

    assert counts >= max(free // 2, min(MIN_CHUNK, free))


@given(st.integers(0, 300), st.integers(1, 4000), st.integers(400, 2000))
def test_a_chunk_that_the_bound_cuts_fills_a_captured_step(num_decodes, wanted, most):
    """Or ends its prompt; sizes lie close, so that filling one costs little."""
    budget, (count,) = filled(FAST, tuple(range(32, 2049, 32)), num_decodes, [(0, wanted)], most)

    assert count == wanted or budget.num_tokens % 32 == 0
    assert budget.num_tokens > most - 32 or count == wanted


def test_one_token_beyond_a_size_is_left_for_the_next_step():
    """577 tokens would cost what 640 cost."""
    budget, counts = filled(FAST, SIZES, 64, [(0, 2000)], 577)
    assert (budget.num_tokens, counts) == (576, [512])


def test_a_prompt_that_ends_is_not_cut():
    """A step of its own for its last token would cost more than some padding."""
    budget, counts = filled(FAST, SIZES, 64, [(0, 513), (0, 2000)], 700)
    assert counts == [513, 640 - 577]
    assert budget.num_tokens == 640
    assert filled(FAST, SIZES, 64, [(0, 513)])[1] == [513]


def test_padding_that_is_paid_for_is_used():
    """Behind prompts that ended beyond a size, the next chunk costs nothing up to the next size."""
    budget, counts = filled(FAST, SIZES, 64, [(0, 513), (0, 2000)], 600)
    assert (budget.num_tokens, counts) == (600, [513, 23])


def test_what_a_chunk_leaves_is_not_given_to_the_next_one():
    """Else the step would be as large as if nothing had been left out."""
    assert filled(FAST, SIZES, 64, [(0, 2000), (0, 2000)], 577)[1] == [512, 0]


def test_a_step_beyond_the_largest_size_falls_back_to_it_unless_that_halves_it():
    """A little more than it would run without a graph; much more is worth that."""
    assert filled(FAST, SIZES, 0, [(0, 4000)], 1200)[1] == [1024]
    assert filled(FAST, SIZES, 0, [(0, 4000)], 2048)[1] == [1024]
    assert filled(FAST, SIZES, 64, [(0, 4000)], 2048)[1] == [1984]


def steps_of(graphs):
    """What is planned of a decode and a prompt of 100 beside it, 40 tokens a step; outputs are checked."""
    requests = [make_request(3, 12, handle=1), make_request(100, 3, handle=2)]
    harness = running(requests[0], on=make_executor(max_num_batched_tokens=40, graphs=graphs))
    harness.submit(requests[1])
    plans = [scheduled(harness.step()) for _ in range(5)]
    harness.finish()
    assert all(tuple(harness.client.token_ids[each.handle]) == expected_output(each) for each in requests)
    return plans


def test_plans_fill_the_sizes_that_an_executor_names():
    """37 tokens of a prompt in three steps instead of 39; the rest, and decodes alone, as they are."""
    assert steps_of(GraphSizes((1, 2), (16, 32, 38))) == [
        {0: 1, 1: 37},
        {0: 1, 1: 37},
        {0: 1, 1: 26},
        *2 * [{0: 1, 1: 1}],
    ]


def test_plans_are_as_before_where_an_executor_names_none():
    """Also where it captures only steps that decode."""
    plain = [{0: 1, 1: 39}, {0: 1, 1: 39}, {0: 1, 1: 22}, *2 * [{0: 1, 1: 1}]]
    assert steps_of(None) == plain
    assert steps_of(GraphSizes((1, 2, 4), ())) == plain

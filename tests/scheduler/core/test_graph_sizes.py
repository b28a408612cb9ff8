"""Executors that capture steps: what a step holds comes to the size of a captured one, and nobody waits for it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from both_sides.audited import expected_output, make_executor
from both_sides.harness import CoreHarness, scheduled
from paceline.plan.values import GraphSizes, StepPoint
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.planning.step_budget import MIN_CHUNK, StepBudget
from paceline_scheduler.core.planning.step_time import StepTimeModel
from paceline_scheduler.testing.requests import make_request

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
    harness = CoreHarness(make_executor(max_num_batched_tokens=40, graphs=graphs))
    requests = [make_request(3, 12, handle=1), make_request(100, 3, handle=2)]
    harness.submit(requests[0])
    harness.step()
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

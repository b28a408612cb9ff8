"""More arrives than can be done: what is taken is still done in time, the rest is refused, and it passes quickly.

The real core in virtual time against executors of a made-up speed; a second here is not a second of the test.
"""

import random
from dataclasses import replace

import pytest

from both_sides.open_loop import Arrival, Capacity, OpenLoop, faster, poisson
from paceline_executor.runner.step_times import StepTimeCurve
from paceline_scheduler.core.limits import CoreLimits

EXECUTOR = Capacity(
    num_blocks=2048,
    max_num_rows=64,
    max_num_batched_tokens=1024,
    max_model_len=2048,
    step_times=StepTimeCurve(((1, 5e6), (1024, 107e6))),
)
TTFT_S, ITL_S = 0.3, 0.05
LIMITS = CoreLimits(ttft_budget_s=TTFT_S, itl_budget_s=ITL_S)
NUM_PROMPT, NUM_OUTPUT = 100, 16
CAPACITY = 66.0
"""Requests per second of these lengths that the executor finishes; `test_the_capacity_is_what_it_is_taken_for`."""


def arrivals_at(load, seconds, seed=1):
    """Return Poisson arrivals at a multiple of the capacity."""
    chance = random.Random(seed)  # noqa: S311
    return poisson(load * CAPACITY, seconds, chance, NUM_PROMPT, NUM_OUTPUT)


def goodput(load, seconds=4.0, num_executors=1):
    """Return requests answered in time per second, of those that arrive."""
    loop = OpenLoop([EXECUTOR] * num_executors, LIMITS)
    courses = loop.run(arrivals_at(load * num_executors, seconds))
    return sum(course.is_good(TTFT_S, ITL_S) for course in courses) / seconds


def test_the_capacity_is_what_it_is_taken_for():
    limits = CoreLimits(ttft_budget_s=1e6)
    courses = OpenLoop([EXECUTOR], limits).run(faster(arrivals_at(1.0, 4.0), 1e6))
    assert len(courses) / max(course.token_s[-1] for course in courses) == pytest.approx(CAPACITY, rel=0.1)


def test_goodput_holds_far_beyond_capacity():
    best = max(goodput(0.9), goodput(1.2))
    assert best > 0.75 * CAPACITY
    assert min(goodput(2.0), goodput(10.0, 2.0)) >= 0.95 * best


def test_two_executors_take_twice_as_much():
    """One line over both: goodput doubles within a tenth."""
    assert goodput(2.0, 2.0, num_executors=2) >= 1.9 * goodput(2.0, 2.0)


def test_latency_is_back_two_seconds_after_a_flood():
    later = [Arrival(4.0 + index, NUM_PROMPT, NUM_OUTPUT) for index in range(3)]
    courses = OpenLoop([EXECUTOR], LIMITS).run([*arrivals_at(10.0, 2.0), *later])[-3:]
    (base,) = OpenLoop([EXECUTOR], LIMITS).run([Arrival(0.0, NUM_PROMPT, NUM_OUTPUT)])
    assert [course.first_s for course in courses] == pytest.approx([base.first_s] * 3, rel=0.1)


def test_what_is_taken_is_finished_and_the_rest_is_refused():
    """I6: each arrival ends in exactly one way, and refusals say so at once."""
    courses = OpenLoop([EXECUTOR], LIMITS).run(arrivals_at(5.0, 1.0))
    assert all(course.was_refused != (len(course.token_s) == course.arrival.num_output_tokens) for course in courses)


def goodput_of_others(flood_load, seconds=6.0):
    """Answers in time per second for three tenants, each at a fifth of the capacity, beside a fourth at this load."""
    arrivals = [
        replace(arrival, tenant=tenant)
        for seed, (tenant, load) in enumerate({"a": 0.2, "b": 0.2, "c": 0.2, "flood": flood_load}.items())
        for arrival in arrivals_at(load, seconds, seed)
    ]
    courses = OpenLoop([EXECUTOR], LIMITS).run(sorted(arrivals, key=lambda arrival: arrival.at_s))
    return sum(course.is_good(TTFT_S, ITL_S) for course in courses if course.arrival.tenant != "flood") / seconds


@pytest.mark.parametrize("flood_load", [2.0, 5.0])
def test_a_flood_by_one_tenant_leaves_the_others_their_goodput(flood_load):
    """Nothing is configured."""
    assert goodput_of_others(flood_load) >= 0.95 * goodput_of_others(0.2)


def test_few_requests_are_preempted_when_the_pool_is_full_all_the_time():
    """Lengths as in conversations, a pool of a tenth of what all would need: at most 8 % are preempted, all end."""
    chance = random.Random(5)  # noqa: S311
    small = replace(EXECUTOR, num_blocks=160, step_times=StepTimeCurve(((1, 1e6), (64, 4e6))))
    loop = OpenLoop([small], CoreLimits(ttft_budget_s=1e6, itl_budget_s=10.0))
    arrivals = [
        Arrival(index * 1e-3, round(chance.lognormvariate(4, 0.8)), 1 + round(chance.lognormvariate(3.5, 0.8)))
        for index in range(150)
    ]
    courses = loop.run(arrivals)
    assert all(len(course.token_s) == course.arrival.num_output_tokens for course in courses)
    assert len(loop.preempted) <= 0.08 * len(courses)

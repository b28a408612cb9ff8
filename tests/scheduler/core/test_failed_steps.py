"""Requests that make steps fail or executors die: found by running alone, and nobody else loses a token."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from both_sides.audited import make_executor
from both_sides.harness import CoreHarness, running
from paceline.plan.values import FailedStep
from paceline_executor import errors as executor_errors
from paceline_executor.runner.interface import RowProblem
from paceline_scheduler.core.events import ExecutorAttached
from paceline_scheduler.errors import (
    ExecutorFailedError,
    FormTooCostlyError,
    NoTokenLeftError,
    QuarantinedError,
    StepFailedError,
)
from scheduler_rig.requests import make_request

FIRST = "executor-0"


def failing_in(harness, *requests):
    """From now on steps with these requests fail on every executor."""
    for executor in harness.executors.values():
        executor.failing |= {request.key for request in requests}


def fails(harness, address=FIRST):
    """The next step is planned, and it fails; returns its plan."""
    plan = harness.plan(address)
    epoch = harness.executors[address].epoch
    harness.run(address)
    assert harness.executors[address].epoch == epoch + 1, "the link has attached again"
    return plan


def fails_or_ends(harness, address=FIRST):
    """The next step is planned, and it fails; the executor may end because of it."""
    assert harness.plan(address) is not None
    harness.run(address)


@given(
    shapes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=6),
    num_executors=st.integers(1, 2),
    culprits=st.sets(st.integers(0, 5)),
    num_steps_before=st.integers(0, 6),
    num_blocks=st.integers(8, 16),
)
def test_exactly_the_requests_that_make_steps_fail_do_fail(
    shapes, num_executors, culprits, num_steps_before, num_blocks
):
    requests = [make_request(prompt, max_tokens) for prompt, max_tokens in shapes]
    executors = [make_executor(num_blocks=num_blocks, incarnation=10 * number + 1) for number in range(num_executors)]
    harness = CoreHarness(*executors)
    harness.submit(*requests)
    for number in range(num_steps_before):
        harness.step(f"executor-{number % num_executors}")
    failing = [request for number, request in enumerate(requests) if number in culprits]
    over = {request.handle for request in failing if request.handle in harness.client.finishes}
    failing_in(harness, *failing)
    harness.finish()
    harness.views.check()
    failed = {request.handle for request in failing} - over
    assert harness.client.failures.keys() == failed
    kinds = StepFailedError if not harness.num_ended_by_themselves else (StepFailedError, QuarantinedError)
    assert all(isinstance(error, kinds) for error in harness.client.failures.values())
    assert len(failed) > 2 or not harness.num_ended_by_themselves
    harness.assert_whole(*(request for request in requests if request.handle not in failed))


def test_what_fails_alone_twice_fails_with_the_executors_words():
    request = make_request(3, 8)
    harness = running(request, steps=0)
    failing_in(harness, request)
    fails(harness)
    assert not harness.client.failures
    fails(harness)
    assert "a step failed on the executor" in str(harness.client.failures[request.handle])
    harness.finish()
    assert harness.executors[FIRST].num_steps <= 1  # its row is released


def test_suspects_that_got_beyond_the_step_that_failed_run_together_again():
    """A chunk of a prompt as long as that of the failure is enough: they need not come to their first token."""
    harness = CoreHarness(make_executor(max_num_batched_tokens=34, num_blocks=64))
    good = [make_request(20, 3), make_request(20, 3)]
    bad = make_request(4, 3)
    harness.submit(bad, *good)
    failing_in(harness, bad)
    num_rows = [len(plan.rows) for plan in iter(harness.step, None)]
    assert num_rows[:6] == [3, 1, 1, 1, 1, 2]  # all, the bad one, each good one, the bad one again, the good ones
    assert harness.client.failures.keys() == {bad.handle}
    harness.assert_whole(*good)


def test_what_fails_alone_once_goes_on():
    request = make_request(3, 8)
    harness = running(request, steps=0)
    failing_in(harness, request)
    fails(harness)
    harness.executors[FIRST].failing.clear()
    harness.finish()
    assert not harness.client.failures
    harness.assert_whole(request)


def test_what_failed_alone_is_tried_on_another_executor_if_there_is_one():
    harness = CoreHarness(make_executor(incarnation=1), make_executor(incarnation=11))
    request, sick = make_request(3, 8), harness.executors[FIRST]
    harness.submit(request)
    sick.failing.add(request.key)
    fails(harness)
    harness.finish()
    assert not harness.client.failures
    assert sick.num_steps <= 1  # its row is released
    harness.assert_whole(request)


def test_after_a_failure_alone_what_nobody_suspects_runs_first():
    harness = CoreHarness(make_executor())
    bad, worse, good = make_request(3, 8), make_request(3, 8), make_request(3, 30)
    harness.submit(bad, worse)
    failing_in(harness, bad, worse)
    assert len(fails(harness).rows) == 2
    harness.submit(good)
    for _ in range(4):
        assert len(fails(harness).rows) == 1
        assert [placement.request.key for placement in harness.step().new_requests] in ([good.key], [])
    harness.finish()
    assert harness.client.failures.keys() == {bad.handle, worse.handle}
    harness.assert_whole(good)


def test_an_executor_that_is_to_blame_takes_no_request_of_several_with_it():
    requests = [make_request(3, 8) for _ in range(4)]
    harness = running(*requests, steps=0)
    failing_in(harness, *requests)
    while not harness.num_ended_by_themselves:
        fails_or_ends(harness)
    harness.executors[FIRST].failing.clear()
    harness.finish()
    assert not harness.client.failures
    harness.assert_whole(*requests)


def test_a_failed_step_is_remembered_when_the_executor_was_lost_meanwhile():
    requests = [make_request(3, 8) for _ in range(3)]
    harness = running(*requests)
    plan = harness.plan()
    executor = harness.executors[FIRST]
    executor.failing.add(requests[1].key)
    with pytest.raises(executor_errors.StepFailedError):
        executor.run_next()
    for _ in range(2):  # as often as it cannot be reached
        harness.lose()
    harness.attach()
    assert len(plan.rows) == 3
    assert harness.views.executor(FIRST).suspects.rows == {0, 1, 2}
    harness.finish()
    assert harness.client.failures.keys() == {requests[1].handle}
    harness.assert_whole(requests[0], requests[2])


def test_a_failure_of_another_schedulers_step_accuses_nobody():
    request = make_request(3, 8)
    harness = running(request, steps=0)
    harness.plan()
    executor = harness.executors[FIRST]
    description, snapshot = executor.attach(FIRST)
    told = replace(description, failed_step=FailedStep(description.epoch - 2, 1, "of somebody else"))
    harness.feed(ExecutorAttached(told, snapshot))
    harness.finish()
    assert not harness.client.failures
    harness.assert_whole(request)


def test_a_cancelled_request_of_a_failed_step_is_not_failed_as_well():
    harness = CoreHarness(make_executor())
    request, other = make_request(3, 8), make_request(3, 4)
    harness.submit(request)
    failing_in(harness, request)
    harness.plan()
    harness.cancel(request)
    harness.run()
    harness.submit(other)
    harness.finish()
    assert not harness.client.failures
    harness.assert_whole(other)


@pytest.mark.parametrize(
    ("problem", "error", "num_hit"),
    [
        (RowProblem.NOT_FINITE, ExecutorFailedError, 0),
        (RowProblem.NOTHING_LEFT, NoTokenLeftError, 8),
        (RowProblem.FORM, FormTooCostlyError, 8),
    ],
)
def test_a_row_fails_alone_and_nobody_begins_behind_blocks_of_it_that_may_hold_no_numbers(problem, error, num_hit):
    prompt = [*range(12)]
    first, second = make_request(prompt, 4), make_request([*prompt[:9], 77], 4)
    harness = running(first, on=make_executor(block_size=4, max_num_batched_tokens=8))
    harness.executors[FIRST].fail_row(first.key, problem)
    harness.step()
    assert type(harness.client.failures[first.handle]) is error
    harness.submit(second)
    harness.finish()
    harness.views.check()
    assert harness.client.finishes[second.handle].num_cached_tokens == num_hit
    assert len(harness.executors[FIRST].snapshot().tags.block_ids) == len(
        harness.views.executor(FIRST).ledger.pool._keys
    )
    harness.assert_whole(second)


# Requests of which executors die: suspected, run alone, and given up only when one died of nothing else


FIRST = "executor-0"


def dies(harness, address=FIRST):
    """The executor dies in the step that is planned now, and comes back with nothing."""
    plan = harness.plan(address)
    harness.die(address)
    return plan


def test_after_two_deaths_in_a_row_a_request_runs_alone():
    """Everybody in the step is suspected, and each is tried by itself, before all others."""
    harness = running(make_request(3, 8), make_request(3, 8), steps=0)
    assert [len(dies(harness).rows) for _ in range(2)] == [2, 2]
    harness.submit(make_request(3, 8))
    assert len(harness.plan().rows) == 1


def test_one_that_kills_an_executor_alone_fails():
    """And the others, which only lived through it, go on."""
    harness = CoreHarness(make_executor())
    killer, bystander = make_request(3, 8), make_request(3, 8)
    harness.submit(killer, bystander)
    for _ in range(2):
        dies(harness)
    plan = dies(harness)
    assert len(plan.rows) == 1
    (handle,) = harness.client.failures
    assert isinstance(harness.client.failures[handle], QuarantinedError)
    harness.finish()
    other = bystander if handle == killer.handle else killer
    harness.assert_whole(other)


@pytest.mark.parametrize("num_deaths", [5, 9])
def test_a_request_that_gets_on_between_deaths_is_never_to_blame(num_deaths):
    request = make_request(3, 24)
    harness = running(request, steps=0)
    for _ in range(num_deaths):
        harness.step()
        dies(harness)
    harness.finish()
    harness.assert_whole(request)
    assert not harness.client.failures


def test_who_waited_is_not_suspected():
    """Only what was in the step that ran."""
    harness = CoreHarness(make_executor(max_num_rows=1))
    first, second = make_request(3, 8), make_request(3, 8)
    harness.submit(first, second)
    for _ in range(2):
        dies(harness)
    waiting = {live.request.handle: live for live in harness.views.waiting_requests()}
    assert waiting[first.handle].is_suspect
    assert waiting[second.handle].suspicion.num_executor_deaths == 0


def test_an_executor_that_was_only_frozen_accuses_nobody():
    request = make_request(3, 30)
    harness = running(request, steps=0)
    for _ in range(4):
        harness.plan()
        harness.lose()
        harness.executors[FIRST].drop_waiting()
        harness.attach()
    harness.finish()
    harness.assert_whole(request)
    assert not harness.client.failures

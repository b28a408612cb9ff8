"""Requests of which executors die: suspected, run alone, and given up only when an executor died of nothing else."""

import pytest

from both_sides.audited import expected_output, make_executor
from both_sides.harness import CoreHarness
from paceline_scheduler.core.events import ExecutorLost
from paceline_scheduler.errors import QuarantinedError
from paceline_scheduler.testing.requests import make_request

FIRST = "executor-0"


def dies(harness, address=FIRST):
    """The executor dies in the step that is planned now, and comes back with nothing."""
    plan = harness.plan(address)
    harness.feed(ExecutorLost(address))
    harness.executors[address].restart()
    harness.attach(address)
    return plan


def rows_of(plan):
    """How many requests run in a step."""
    return len(plan.rows)


def test_after_two_deaths_in_a_row_a_request_runs_alone():
    """Everybody in the step is suspected, and each is tried by itself, before all others."""
    harness = CoreHarness(make_executor())
    harness.submit(make_request(3, 8), make_request(3, 8))
    assert [rows_of(dies(harness)) for _ in range(2)] == [2, 2]
    harness.submit(make_request(3, 8))
    assert rows_of(harness.plan()) == 1


def test_who_gets_on_alone_is_not_to_blame():
    harness = CoreHarness(make_executor())
    requests = [make_request(3, 8), make_request(3, 8)]
    harness.submit(*requests)
    for _ in range(2):
        dies(harness)
    harness.finish()
    for request in requests:
        assert tuple(harness.client.token_ids[request.handle]) == expected_output(request)


def test_one_that_kills_an_executor_alone_fails():
    """And the others, which only lived through it, go on."""
    harness = CoreHarness(make_executor())
    killer, bystander = make_request(3, 8), make_request(3, 8)
    harness.submit(killer, bystander)
    for _ in range(2):
        dies(harness)
    plan = dies(harness)
    assert rows_of(plan) == 1
    (handle,) = harness.client.failures
    assert isinstance(harness.client.failures[handle], QuarantinedError)
    harness.finish()
    other = bystander if handle == killer.handle else killer
    assert tuple(harness.client.token_ids[other.handle]) == expected_output(other)


@pytest.mark.parametrize("num_deaths", [5, 9])
def test_a_request_that_gets_on_between_deaths_is_never_to_blame(num_deaths):
    harness = CoreHarness(make_executor())
    request = make_request(3, 24)
    harness.submit(request)
    for _ in range(num_deaths):
        harness.step()
        dies(harness)
    harness.finish()
    assert tuple(harness.client.token_ids[request.handle]) == expected_output(request)
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
    harness = CoreHarness(make_executor())
    request = make_request(3, 30)
    harness.submit(request)
    for _ in range(4):
        harness.plan()
        harness.feed(ExecutorLost(FIRST))
        harness.executors[FIRST].drop_waiting()
        harness.attach(FIRST)
    harness.finish()
    assert tuple(harness.client.token_ids[request.handle]) == expected_output(request)
    assert not harness.client.failures


def test_a_suspect_stays_one_for_the_next_scheduler():
    harness = CoreHarness(make_executor())
    request = make_request(3, 8, is_resumable=True)
    harness.submit(request, make_request(3, 8, is_resumable=True))
    for _ in range(2):
        dies(harness)
    harness.plan()
    harness.run()
    seen = [row.history for row in harness.executors[FIRST].snapshot().rows]
    assert [(history.num_executor_deaths, history.last_death_offset) for history in seen] == [(2, 0)]

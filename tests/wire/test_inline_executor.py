"""What tests of the core drive: a rule of the plan protocol that is broken there is a loud error."""

from dataclasses import replace

import pytest

from both_sides.audited import make_executor
from paceline.plan.values import BatchPlan, BlockGrants, BlockTags, Release
from paceline_executor.runner.interface import RowProblem
from paceline_scheduler.testing.requests import column, make_placement, make_request

KEY = bytes(range(16))


class Driven:
    """An executor with blocks of 4 slots, and a way to write plans down in short."""

    def __init__(self, **options):
        self.executor = make_executor(**options)
        self.description, _ = self.executor.attach("x")
        self.step_id = 0

    def plan(self, num_tokens=0, **changes):
        """Return the next plan, which runs so many tokens of row 0."""
        self.step_id += 1
        head = (self.description.incarnation, self.description.epoch, self.step_id)
        rows = ((0,), (num_tokens,)) if num_tokens else ((), ())
        return BatchPlan(*head, *(column(*values) for values in rows), 0, **changes)

    def first_plan(self, request):
        """Return a plan that computes a prompt of 5 tokens on row 0, in blocks 10 and 11."""
        grants = BlockGrants(column(0, 0), column(0, 1), column(10, 11))
        return self.plan(5, new_requests=(make_placement(0, request),), grants=grants)


@pytest.fixture
def driven():
    """One with a request on row 0, which has a token."""
    driven = Driven()
    driven.executor.execute(driven.first_plan(make_request(5, 8)))
    return driven


@pytest.mark.parametrize("change", [{"epoch": 7}, {"incarnation": 7}, {"step_id": 9}])
def test_a_plan_of_another_epoch_or_a_gap_is_refused(driven, change):
    with pytest.raises(AssertionError, match="not the plan"):
        driven.executor.receive(replace(driven.plan(), **change))


def test_no_more_plans_are_in_flight_than_the_executor_takes(driven):
    for _ in range(4):
        driven.executor.receive(driven.plan())
    with pytest.raises(AssertionError, match="more plans in flight"):
        driven.executor.receive(driven.plan())


def test_what_a_scheduler_may_not_send_is_loud_when_it_arrives_and_when_it_runs(driven):
    """Although the executor itself would run the first of them."""
    with pytest.raises(AssertionError, match="tag of a block before the result that filled it"):
        driven.executor.receive(driven.plan(tags=BlockTags.of([(11, KEY)])))
    released = Driven()
    released.executor.execute(released.first_plan(make_request(5, 8)))
    released.executor.execute(released.plan(releases=(Release(0, None),)))
    with pytest.raises(AssertionError, match="tag of a released block"):
        released.executor.execute(released.plan(tags=BlockTags.of([(10, KEY)])))


def test_what_the_executor_refuses_is_loud(driven):
    with pytest.raises(AssertionError, match="beyond its known tokens"):
        driven.executor.execute(driven.plan(2))


def test_attaching_drops_plans_that_did_not_run_and_begins_an_epoch(driven):
    driven.executor.receive(driven.plan(releases=(Release(0, None),)))
    description, snapshot = driven.executor.attach("x")
    assert (description.epoch, driven.executor.num_plans_waiting) == (2, 0)
    assert [(row.row, row.num_computed_tokens) for row in snapshot.rows] == [(0, 5)]


def test_a_restart_is_another_incarnation_that_knows_nothing(driven):
    driven.executor.restart()
    description, snapshot = driven.executor.attach("x")
    assert (description.incarnation, description.epoch) == (driven.description.incarnation + 1, 1)
    assert snapshot.rows == ()


def test_a_row_can_fail_alone_once(driven):
    (row,) = driven.executor.rows.values()
    driven.executor.fail_row(row.record_id, RowProblem.NOT_FINITE)
    result = driven.executor.execute(driven.plan(1))
    assert [(error.row, error.reason) for error in result.errors] == [(0, "NUMERIC_FAULT")]
    assert driven.executor.execute(driven.plan(1)).errors == ()

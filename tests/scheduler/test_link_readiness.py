"""When nobody is served, and nobody can come back."""

from dataclasses import replace

import pytest

from paceline_scheduler.backend import ExecutorStatus, StepTotals
from paceline_scheduler.link.messages import ExecutorState
from paceline_scheduler.link.readiness import Standing, is_at_rest

IDLE = ExecutorStatus("a:1", ExecutorState.READY, 1, 1, "model", 0, 8, 8, 0, 0, 0, 0, 0, 0, "", StepTotals())
BUSY = replace(IDLE, address="b:1", num_running_requests=1)
UNKNOWN = [replace(IDLE, state=state) for state in (ExecutorState.CONNECTING, ExecutorState.SYNCING)]


@pytest.mark.parametrize("executors", [[], [IDLE, BUSY], *([IDLE, executor] for executor in UNKNOWN)])
@pytest.mark.parametrize("standing", [Standing.READY, Standing.UNREADY])
def test_whoever_may_run_something_keeps_a_scheduler_busy(standing, executors):
    """Also what has not said yet what it runs, and that nothing is known of any."""
    assert not is_at_rest(standing, executors, 0)


@pytest.mark.parametrize("state", [ExecutorState.READY, ExecutorState.DRAINING, ExecutorState.LOST])
def test_executors_that_run_nothing_leave_it_at_rest_until_a_request_waits(state):
    """One that is lost has nothing that could be gone on with before it is back."""
    executors = [IDLE, replace(IDLE, state=state)]
    assert is_at_rest(Standing.READY, executors, 0)
    assert not is_at_rest(Standing.READY, executors, 1)


def test_a_scheduler_that_stands_by_serves_nobody():
    """Whatever the executors run, another one drives them."""
    assert is_at_rest(Standing.STANDING_BY, [BUSY, *UNKNOWN], 0)

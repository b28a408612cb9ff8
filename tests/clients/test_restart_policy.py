"""When a process that ended is started again, told by a clock that only moves by hand."""

import pytest

from paceline_client.cli.supervisor.restart_policy import GiveUp, RestartAt, RestartPolicy

CRASH = 1
KILLED = -9


def pauses_of_failures(policy, num_failures, now=100.0):
    """How long each of several failed starts in a row is waited for."""
    pauses = []
    for _ in range(num_failures):
        verdict = policy.exited(CRASH, now)
        pauses.append(verdict.seconds - now)
        now = verdict.seconds
    return pauses


def test_a_process_that_served_is_started_again_at_once():
    """Its users wait for it."""
    policy = RestartPolicy()
    policy.became_ready()
    assert policy.exited(KILLED, 7.0) == RestartAt(7.0)


def test_failed_starts_are_spaced_out_up_to_ten_seconds():
    """0.1 s, doubling, and never more than 10 s, however long it goes on."""
    pauses = pauses_of_failures(RestartPolicy(), 10)
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10, 10])


def test_becoming_ready_forgets_the_failures():
    """The next crash is the first of a new life."""
    policy = RestartPolicy()
    pauses_of_failures(policy, 5)
    policy.became_ready()
    assert policy.exited(CRASH, 50.0) == RestartAt(50.0)
    assert pauses_of_failures(policy, 2) == pytest.approx([0.1, 0.2])


@pytest.mark.parametrize("exit_code", [2, 3, 4, 5, 64, 78])
def test_an_error_that_stays_is_given_up_before_the_first_success(exit_code):
    """A wrong option, a missing model, a port in use."""
    assert RestartPolicy().exited(exit_code, 0.0) == GiveUp()


@pytest.mark.parametrize("exit_code", [0, 1, 6, 63, 79, 130, KILLED])
def test_other_ends_are_tried_again(exit_code):
    """They may have passed by the next time."""
    assert RestartPolicy().exited(exit_code, 0.0) == RestartAt(0.1)


def test_what_has_worked_is_never_given_up():
    """The model was there once; whoever moved it may bring it back."""
    policy = RestartPolicy()
    policy.became_ready()
    policy.exited(KILLED, 0.0)
    assert policy.exited(78, 0.0) == RestartAt(0.1)

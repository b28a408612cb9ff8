"""Requests that nobody listens to hold nobody up: after some seconds they give way to those with a listener."""

from both_sides.audited import expected_output, make_executor
from both_sides.harness import CoreHarness
from paceline_scheduler.core.events import Detach
from paceline_scheduler.core.live import ABANDONED_AFTER_S
from paceline_scheduler.testing.requests import make_request


def abandoned(number, num_rows=4):
    """So many resumable requests of one tenant have begun, as far as there are rows, when their client vanishes."""
    harness = CoreHarness(make_executor(max_num_rows=num_rows, num_blocks=256))
    requests = [make_request(3, 200, is_resumable=True, tenant="vanished") for _ in range(number)]
    harness.submit(*requests)
    for _ in range(5):
        harness.step()
    for request in requests:
        harness.feed(Detach(request.handle))
    return harness, requests


def pass_s(harness, seconds):
    """Let time pass, in steps."""
    for _ in range(5):
        harness.clock.advance(seconds / 5)
        harness.step()


def test_a_newcomer_is_served_soon_although_a_client_left_the_queue_full():
    harness, _ = abandoned(60)
    assert harness.views.num_waiting()[0] == 56
    pass_s(harness, ABANDONED_AFTER_S + 0.1)
    assert harness.views.num_waiting()[0] == 0
    newcomer = make_request(3, 5)
    harness.submit(newcomer)
    for _ in range(12):
        harness.step()
    assert tuple(harness.client.token_ids[newcomer.handle]) == expected_output(newcomer)


def test_what_runs_goes_on_unheard_while_nobody_waits():
    harness, _ = abandoned(4)
    pass_s(harness, 2 * ABANDONED_AFTER_S)
    assert harness.views.counts("executor-0").num_running_requests == 4
    harness.submit(make_request(3, 5))
    for _ in range(12):
        harness.step()
    assert harness.views.counts("executor-0").num_running_requests == 0


def test_a_client_that_comes_back_in_time_finds_its_request_where_it_was():
    """A restart or a broken connection costs it nothing, however many others wait."""
    harness, requests = abandoned(6)
    harness.submit(make_request(3, 5))
    pass_s(harness, ABANDONED_AFTER_S - 0.1)
    for request in requests:
        harness.resume(request)
    pass_s(harness, 2 * ABANDONED_AFTER_S)
    harness.finish()
    for request in requests:
        assert tuple(harness.client.token_ids[request.handle]) == expected_output(request)

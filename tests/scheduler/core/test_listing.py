"""Lists of requests: all of them, once each, and of each what an explanation says."""

from hypothesis import given
from hypothesis import strategies as st

from both_sides.audited import make_executor
from both_sides.harness import CoreHarness
from paceline.plan.values import FinishReason
from paceline_scheduler.core.answers import RequestState
from paceline_scheduler.core.events import End
from paceline_scheduler.core.queue.listing import Selection
from paceline_scheduler.testing.requests import make_request


def pages(harness, at_most, meanwhile=lambda: None, **selection):
    """Ask for page after page; `meanwhile` happens between two."""
    found, after = [], 0
    while after is not None:
        page = harness.views.listed(Selection(after=after, at_most=at_most, **selection), harness.clock())
        assert len(page.requests) <= at_most
        found += page.requests
        after = page.next_after
        meanwhile()
    return found


def busy_harness(num_rows, tenants, num_steps):
    """A system in which some requests run and others wait."""
    harness = CoreHarness(make_executor(max_num_rows=num_rows))
    requests = [make_request(3, 40, tenant=tenant) for tenant in tenants]
    harness.submit(*requests)
    for _ in range(num_steps):
        harness.step()
    return harness, requests


@given(
    num_rows=st.integers(1, 4),
    tenants=st.lists(st.sampled_from("ab"), min_size=1, max_size=12),
    num_steps=st.integers(0, 4),
    at_most=st.integers(1, 5),
)
def test_pages_hold_every_request_once_as_it_is_explained(num_rows, tenants, num_steps, at_most):
    harness, requests = busy_harness(num_rows, tenants, num_steps)
    found = pages(harness, at_most)
    assert [listed.key for listed in found] == [request.key for request in requests]
    for listed in found:
        assert listed.explanation == harness.views.explain(listed.key, harness.clock())
    for tenant in "ab":
        of_tenant = [listed for listed in found if listed.key.tenant == tenant]
        assert pages(harness, at_most, tenant=tenant) == of_tenant
    for state in RequestState:
        in_state = [listed for listed in found if listed.explanation.state is state]
        assert pages(harness, at_most, states=frozenset({state})) == in_state


def test_what_comes_and_goes_between_two_pages_moves_no_other():
    """One of the first page ends, two arrive: all that were there all the time are listed once."""
    harness, requests = busy_harness(2, "aaaa", 1)
    newer = [make_request(3, 4), make_request(3, 4)]

    def change():
        if harness.views.num_unfinished() == len(requests):
            harness.feed(End(requests[0].handle, 0, FinishReason.CANCELLED))
            harness.submit(*newer)

    found = [listed.key for listed in pages(harness, 2, change)]
    assert found == [request.key for request in (*requests, *newer)]


def test_a_request_without_a_listener_and_with_a_deadline_says_so():
    harness, _ = busy_harness(1, "a", 0)
    harness.submit(make_request(3, 4, deadline_s=60.0))
    harness.clock.advance(1.5)
    first, second = pages(harness, 10)
    assert (first.age_s, first.time_left_s, first.has_listener) == (1.5, None, True)
    assert (second.age_s, second.time_left_s, second.max_tokens) == (1.5, 58.5, 4)

"""Bounds of tenants: what of one of them waits, and what it may ask for in a minute."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from both_sides.audited import make_executor
from both_sides.harness import CoreHarness
from paceline_scheduler.core.events import SetTenants
from paceline_scheduler.core.tenants import Tenants
from paceline_scheduler.errors import InvalidRequestError, TenantLimitError
from paceline_scheduler.tenant_limits import TenantBounds, TenantLimits
from paceline_scheduler.testing.requests import make_request


def bounds(**own):
    """The event that gives tenants these bounds."""
    return SetTenants(TenantBounds(own))


def test_more_of_a_tenant_than_may_wait_is_refused_and_others_are_not():
    harness = CoreHarness(make_executor())
    harness.feed(bounds(a=TenantLimits(max_num_queued_reqs=2), b=TenantLimits(max_num_queued_tokens=10)))
    for _ in range(2):
        harness.submit(make_request(4, 4, tenant="a"))
        harness.submit(make_request(4, 4, tenant="b"))
    for tenant in ("a", "b"):
        with pytest.raises(TenantLimitError) as refusal:
            harness.submit(make_request(4, 4, tenant=tenant))
        assert refusal.value.retry_after_s > 0
    harness.submit(make_request(4, 4, tenant="c"))
    harness.finish()
    harness.submit(make_request(4, 4, tenant="a"))
    with pytest.raises(InvalidRequestError, match="11 tokens"):
        harness.submit(make_request(11, 4, tenant="b"))


def test_output_counts_for_the_tokens_of_a_minute():
    """Once it is complete: the debt is worked off before anything else is taken."""
    harness = CoreHarness(make_executor())
    harness.feed(bounds(a=TenantLimits(max_tokens_per_minute=60)))
    harness.submit(make_request(1, 21, tenant="a"))
    harness.submit(make_request(1, 21, tenant="b"))
    harness.finish()
    with pytest.raises(TenantLimitError) as refusal:
        harness.submit(make_request(4, 4, tenant="a"))
    assert refusal.value.retry_after_s == pytest.approx(21.0, abs=0.5)
    harness.submit(make_request(4, 4, tenant="b"))


@given(
    per_minute=st.integers(1, 600),
    gaps_s=st.lists(st.floats(0, 5), min_size=1, max_size=60),
    sizes=st.lists(st.integers(1, 50), min_size=60, max_size=60),
)
def test_no_more_is_taken_than_the_rate_allows(per_minute, gaps_s, sizes):
    """Over any time from the first request: the rate, a burst of two seconds of it, and the last request whole."""
    tenants, now, taken = Tenants(), 0.0, 0
    tenants.set(TenantBounds({"a": TenantLimits(max_tokens_per_minute=per_minute)}), 0.0)
    for gap_s, size in zip(gaps_s, sizes, strict=False):
        now += gap_s
        try:
            tenants.check_rates("a", now)
        except TenantLimitError as refusal:
            tenants.check_rates("a", now + refusal.retry_after_s + 0.001)
            continue
        assert taken <= now * per_minute / 60 + max(1.0, per_minute / 30)
        tenants.take("a", 1, size, now)
        taken += size


def test_bounds_that_change_count_what_was_taken_before():
    """Nobody gets a fresh minute by a line in a file; who has no bounds any more is forgotten."""
    tenants = Tenants()
    for per_minute in (60, 30):
        tenants.set(TenantBounds({"a": TenantLimits(max_requests_per_minute=per_minute)}), 0.0)
        tenants.take("a", 3, 0, 0.0)
    with pytest.raises(TenantLimitError):
        tenants.check_rates("a", 1.0)
    tenants.set(TenantBounds(), 1.0)
    tenants.check_rates("a", 1.0)

"""Bounds of tenants: what of one of them waits, what it may ask for in a minute, and its share of the KV blocks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from both_sides.audited import make_executor
from both_sides.harness import CoreHarness
from paceline_scheduler.access.tenant_limits import TenantBounds, TenantLimits
from paceline_scheduler.core.events import SetTenants
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.tables.rows import RUNNING
from paceline_scheduler.core.tenants import Tenants
from paceline_scheduler.errors import InvalidRequestError, TenantLimitError
from scheduler_rig.requests import make_request


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


# A tenant's share of the KV blocks: never exceeded, whoever waits, and nobody waits for ever because of it


NUM_BLOCKS, BLOCK_SIZE = 32, 4
QUARTER = TenantLimits(max_kv_share=0.25)  # 8 blocks, 32 slots


def harness_with(bounds, *executors):
    """A core whose forecasts refuse nobody, with these bounds."""
    made = executors or (make_executor(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE),)
    harness = CoreHarness(*made, limits=CoreLimits(ttft_budget_s=1e6, itl_budget_s=10.0))
    harness.feed(SetTenants(bounds))
    return harness


def blocks_of_tenants(harness, address="executor-0"):
    """The blocks in the tables of running requests, by tenant: each once."""
    rows = harness.views.executor(address).ledger.rows
    found = {}
    for row, live in enumerate(rows.live):
        if live is not None and rows.state[row] == RUNNING:
            found.setdefault(live.request.key.tenant, set()).update(rows.tables[row])
    return {tenant: len(blocks) for tenant, blocks in found.items()}


def run_watching(harness, most):
    """Go on until all has ended, and return the most blocks that each tenant held; `most` is what it may."""
    held = {}
    for _ in range(5000):
        moved = False
        for address in harness.executors:
            moved |= harness.plan(address) is not None
            for tenant, number in blocks_of_tenants(harness, address).items():
                assert number <= most(tenant), f"{tenant} holds {number} blocks"
                held[tenant] = max(held.get(tenant, 0), number)
            moved |= harness.run(address)
            moved |= harness.complete(address)
        if not moved:
            return held
    raise AssertionError("the core does not come to rest")


requests_of = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(1, 20), st.integers(1, 12), st.booleans()), min_size=1, max_size=16
)


@settings(max_examples=settings.default.max_examples // 2)
@given(
    requests_of,
    st.sampled_from([0.25, 0.5]),
    st.sampled_from([None, 0.25]),
    st.integers(1, 2),
    st.booleans(),
)
def test_a_tenant_never_holds_more_than_its_share_and_all_requests_end(drawn, of_a, of_any, num_executors, are_short):
    bounds = TenantBounds({"a": TenantLimits(max_kv_share=of_a)}, TenantLimits(max_kv_share=of_any))
    executors = [
        make_executor(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, incarnation=number, max_num_drafts=2)
        for number in range(num_executors)
    ]
    harness = harness_with(bounds, *executors)
    if are_short:
        for address in harness.executors:
            harness.expect_short_outputs(address)
    requests = [
        make_request([7] * num_prompt if is_common else num_prompt, num_output, tenant=tenant)
        for tenant, num_prompt, num_output, is_common in drawn
    ]
    harness.submit(*requests)
    run_watching(harness, lambda tenant: bounds.max_num_blocks(tenant, NUM_BLOCKS) or NUM_BLOCKS)
    harness.assert_whole(*requests)
    harness.views.check()


def test_others_run_while_a_tenant_waits_for_its_own_blocks():
    harness = harness_with(TenantBounds({"flood": QUARTER}))
    flood = [make_request(4, 4, tenant="flood") for _ in range(40)]
    harness.submit(*flood)
    other = make_request(40, 8, tenant="other")
    harness.submit(other)
    harness.step()
    assert harness.client.token_ids.get(other.handle) or blocks_of_tenants(harness)["other"] >= 10
    held = run_watching(harness, lambda tenant: 8 if tenant == "flood" else NUM_BLOCKS)
    assert held["flood"] >= 6, "a share is of use to who has it"
    harness.assert_whole(*flood, other)


def test_requests_behind_a_full_share_are_not_ahead_of_others():
    """So that the forecast refuses none for what it will not wait for."""
    harness = harness_with(TenantBounds({"flood": QUARTER}))
    harness.submit(*(make_request(20, 8, tenant="flood") for _ in range(200)))
    harness.step()
    of_flood, of_other = (
        harness.views.estimate(make_request(20, 8, tenant=tenant), harness.clock()) for tenant in ("flood", "other")
    )
    assert of_other.time_to_first_token_s < 0.1 * of_flood.time_to_first_token_s


def test_a_request_that_its_share_could_never_hold_is_refused():
    """In tokens, as where the pool is too small; one that names no length gets what the share holds."""
    harness = harness_with(TenantBounds({"a": QUARTER}))
    with pytest.raises(InvalidRequestError, match="at most 13 fit"):
        harness.submit(make_request(20, 14, tenant="a"))
    with pytest.raises(InvalidRequestError, match="leave no room"):
        harness.submit(make_request(33, None, tenant="a"))
    harness.submit(make_request(20, 14, tenant="b"))
    unbounded = make_request(20, None, tenant="a")
    harness.submit(unbounded)
    run_watching(harness, lambda tenant: 8 if tenant == "a" else NUM_BLOCKS)
    assert len(harness.client.token_ids[unbounded.handle]) == 13


def test_a_share_that_shrinks_stops_nobody():
    harness = harness_with(TenantBounds())
    requests = [make_request(30, 20, tenant="a") for _ in range(3)]
    harness.submit(*requests)
    harness.step()
    harness.feed(SetTenants(TenantBounds({"a": TenantLimits(max_kv_share=0.1)})))
    harness.finish()
    harness.assert_whole(*requests)


def test_what_a_request_waits_for_is_said_of_its_share():
    harness = harness_with(TenantBounds({"a": QUARTER}))
    requests = [make_request(16, 12, tenant="a") for _ in range(2)]
    harness.submit(*requests)
    harness.step()
    explanation = harness.explain(requests[1])
    assert "its tenant holds 4 of the 8 blocks of executor-0 that are its share" in explanation.waiting_for

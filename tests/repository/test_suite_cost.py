"""What a run of all tests costs is told in a unit that machines share."""

import pytest

from suite_cost import LIMITS, ProcessCost, SuiteCost


def test_a_process_tells_its_seconds_and_its_loops_apart():
    cost = ProcessCost()
    before, _ = cost.taken()
    for _ in range(51):
        cost.test_ends()
    after, loops = cost.taken()
    assert len(loops) == 2
    assert min(loops) > 0
    assert 0 <= after - before < sum(loops)


def test_costs_are_added_and_divided_by_the_median_loop():
    total = SuiteCost()
    total.add(30.0, [0.1, 0.1, 5.0])
    total.add(10.0, [0.1])
    assert total.multiple == pytest.approx(400)


@pytest.mark.parametrize(("share", "is_above"), [(1.0, False), (1.24, False), (1.26, True)])
def test_a_tier_that_costs_a_quarter_more_than_its_limit_is_above_it(share, is_above):
    total = SuiteCost()
    total.add(share * LIMITS["test"], [1.0])
    assert total.is_above_limit("test") is is_above
    assert not total.is_above_limit("soak")

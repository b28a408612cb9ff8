"""The measurement of what a refusal costs: it runs, and what it measures is refused."""

from scheduler_cost.refusal_cost import measure


async def test_every_request_is_refused_and_costs_something():
    """A status of another kind would end it."""
    cost = await measure(num_chars=1000, num_refusals=5)
    assert (cost.num_refusals, cost.scheduler_us > 0) == (5, True)

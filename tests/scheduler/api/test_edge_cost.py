"""The measurement of what streaming costs: it runs, and counts what it says it counts."""

import pytest

from scheduler_cost.edge_cost import measure


@pytest.mark.parametrize("call", ["session", "generate"])
async def test_each_step_brings_every_stream_one_token(call):
    cost = await measure(num_streams=2, step_ms=2.0, call=call, seconds=0.2)
    assert cost.num_steps > 0
    assert cost.num_rows_per_step == pytest.approx(2, abs=0.1)
    assert cost.num_tokens_per_delta >= 1
    assert min(cost.scheduler_us, cost.client_us) > 0

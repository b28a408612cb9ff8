"""The measurement of what observing costs: everything that it names happens, or its figures would say nothing."""

from pathlib import Path

import scheduler_cost
from scheduler_cost.observing_cost import OBSERVED, measure


async def test_what_is_measured_happens(monkeypatch):
    """Spans of every request, with a ratio of 1."""
    monkeypatch.setenv("PYTHONPATH", str(Path(scheduler_cost.__file__).parents[1]))
    costs, spans = await measure(1.0, num_rows=4, num_steps=20, num_turns=1, step_s=0.001)
    assert costs.keys() == OBSERVED.keys()
    assert spans["made"] > 0
    assert spans["failed"] == 0
    assert all(min(costs[name].observing_us) > 0 for name, observers in OBSERVED.items() if observers)

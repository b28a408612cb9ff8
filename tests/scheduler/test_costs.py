"""Measurements of what observing and a rogue cost: all that they name happens, or their figures would say nothing."""

from pathlib import Path

import pytest

import scheduler_cost
from scheduler_cost import observing_cost, rogue_cost


@pytest.fixture(autouse=True)
def found_by_processes(monkeypatch):
    """Of each measurement."""
    monkeypatch.setenv("PYTHONPATH", str(Path(scheduler_cost.__file__).parents[1]))


async def test_observing_is_measured_with_spans_of_every_request():
    costs, spans = await observing_cost.measure(1.0, num_rows=4, num_steps=20, num_turns=1, step_s=0.001)
    assert costs.keys() == observing_cost.OBSERVED.keys()
    assert spans["made"] > 0
    assert spans["failed"] == 0
    assert all(min(costs[name].observing_us) > 0 for name, observers in observing_cost.OBSERVED.items() if observers)


async def test_a_rogue_is_measured_in_both_kinds_of_turns_without_a_lost_token():
    gaps_ms = await rogue_cost.measure(num_streams=2, step_ms=2.0, seconds=0.3, num_turns=1)
    assert all(turn for turns in gaps_ms.values() for turn in turns)
    assert len(gaps_ms) == 2

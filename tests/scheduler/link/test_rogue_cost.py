"""The measurement of what a rogue costs honest requests: there are both kinds of turns, and no token is lost."""

from pathlib import Path

import scheduler_cost
from scheduler_cost.rogue_cost import measure


async def test_what_is_measured_happens(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(scheduler_cost.__file__).parents[1]))
    gaps_ms = await measure(num_streams=2, step_ms=2.0, seconds=1.0, num_turns=1)
    assert all(turn for turns in gaps_ms.values() for turn in turns)
    assert len(gaps_ms) == 2

"""The measurement of what traces cost: it sends spans, or its figures would say nothing."""

from pathlib import Path

import scheduler_cost
from scheduler_cost.tracing_cost import cpu_cost


async def test_the_spans_whose_cost_is_measured_arrive(capsys, monkeypatch):
    """Of every request, with a ratio of 1."""
    monkeypatch.setenv("PYTHONPATH", str(Path(scheduler_cost.__file__).parents[1]))
    turns = await cpu_cost(1.0, num_rows=4, num_steps=20)
    assert all(observing > 0 and rest > 0 for observing, _, rest in turns)
    counts = capsys.readouterr().out
    assert "'failed': 0" in counts
    assert "'made': 0" not in counts

"""The measurement of what slow clients cost the others: it runs, and times those that read."""

import pytest

from repository_checks.sources import ROOT
from slow_clients.__main__ import gaps_beside
from slow_clients.crowd import Reading


@pytest.mark.parametrize("reading", Reading)
async def test_eight_streams_are_timed_beside_a_crowd(reading, monkeypatch):
    """However it reads: for as long as was asked for."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "bench"))  # the crowd is a process of its own
    gaps_s = await gaps_beside(reading, num_clients=3, step_ms=10.0, seconds=0.3)
    assert len(gaps_s) >= 8
    assert sum(gaps_s) >= 8 * 0.3

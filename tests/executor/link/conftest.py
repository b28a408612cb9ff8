"""What tests of an executor's link share: patience."""

import pytest


@pytest.fixture(autouse=True)
def patient_snapshots(monkeypatch):
    """A busy machine is no reason to take a step for one that never ends; who tests that sets a bound of its own."""
    monkeypatch.setattr("paceline_executor.link.plan_streams.MIN_STEP_BOUND_NS", 60_000_000_000)

"""What tests of an executor's link share: an executor, and patience."""

import pytest

from executor_rig.hash_executor import hash_executor


@pytest.fixture
async def executor():
    """Eight rows of 64 tokens, 32 blocks of 4."""
    async with hash_executor() as executor:
        yield executor


@pytest.fixture(autouse=True)
def patient_snapshots(monkeypatch):
    """A busy machine is no reason to take a step for one that never ends; who tests that sets a bound of its own."""
    monkeypatch.setattr("paceline_executor.link.plan_streams.MIN_STEP_BOUND_NS", 60_000_000_000)

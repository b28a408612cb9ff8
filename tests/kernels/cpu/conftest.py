"""What only CPUs have: the compiler, and operations that no GPU has."""

import pytest


@pytest.fixture(autouse=True)
def _one_thread(threads):
    """So that a busy machine costs no waiting at barriers."""

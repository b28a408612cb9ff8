"""Fresh memory holds NaN in every kernel test, so that reading it before writing it shows in the result."""

import pytest
import torch

from paceline_kernels.compiler import jit
from paceline_kernels.testing import poisoned


@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))


@pytest.fixture(autouse=True)
def threads():
    """One thread, so that a busy machine costs no waiting at barriers; a test may ask for more."""
    before = jit.num_threads()
    jit.set_num_threads(1)
    yield jit.set_num_threads
    jit.set_num_threads(before)

"""What tests of models share: one thread, so that a busy machine costs no waiting, and results that are no numbers."""

import numpy as np
import pytest

from paceline_kernels.compiler import jit


@pytest.fixture(autouse=True)
def _one_thread():
    before = jit.num_threads()
    jit.set_num_threads(1)
    yield
    jit.set_num_threads(before)


@pytest.fixture
def ieee_arithmetic():
    """Infinity and NaN are results like others: the interpreter computes with numpy, which would warn."""
    with np.errstate(all="ignore"):
        yield

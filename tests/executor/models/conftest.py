"""What tests of models share: one thread, so that a busy machine costs no waiting at barriers."""

import pytest

from paceline_kernels.compiler import jit


@pytest.fixture(autouse=True)
def _one_thread():
    before = jit.num_threads()
    jit.set_num_threads(1)
    yield
    jit.set_num_threads(before)

"""GPU kernels, interpreted on the CPU or run on a GPU, in memory that shows every step beyond what they may touch.

Every tensor that a kernel is given has to go through `place`.
"""

import importlib.util

import numpy as np
import pytest
import torch

from paceline_kernels.testing.bounds import BoundedMemory

# Triton is for Linux.
if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import triton


def pytest_itemcollected(item):
    """The interpreter lets numpy convert arrays of one number, which numpy is about to give up."""
    item.add_marker(pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"))


@pytest.fixture(scope="session")
def device():
    """A GPU if kernels are compiled, see `TRITON_INTERPRET`."""
    return torch.device("cpu" if triton.knobs.runtime.interpret else "cuda")


@pytest.fixture(scope="session", params=["float16", "other"])
def dtype(request, device):
    """Both types that can be relied on: Triton's interpreter computes bfloat16 wrongly, and a GPU takes no float32."""
    return torch.float16 if request.param == "float16" else torch.float32 if device.type == "cpu" else torch.bfloat16


@pytest.fixture
def place(device, monkeypatch):
    """Copies a tensor to where a kernel may use it; what lies around must be untouched when the test ends."""
    memory = BoundedMemory(device)
    if device.type == "cpu":
        from triton.runtime.interpreter import InterpreterBuilder

        load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
        monkeypatch.setattr(InterpreterBuilder, "create_masked_load", memory.watched_load(load))
        monkeypatch.setattr(InterpreterBuilder, "create_masked_store", memory.watched_store(store))
    monkeypatch.setattr(torch, "empty", memory.empty)
    yield memory.place
    assert memory.margins_are_untouched()


@pytest.fixture(autouse=True)
def _ieee_arithmetic():
    """Infinity and NaN are results like others: the interpreter computes with numpy, which would warn."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture
def _products_by_row(monkeypatch):
    """What the interpreter multiplies with: numpy's own product rounds a row by its place in the tile."""
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: np.einsum("ik,kj->ij", a, b, dtype=dtype))

"""Where operations are tested: on a CPU, and on a GPU or in Triton's interpreter, in memory that shows wrong steps.

A test that uses `place` runs once for the CPU's implementation and once for the GPU's kernels, or for these alone if it
asks for `gpu`; with `dtype` in every type that they have, otherwise in the `exact` one. What an operation is given has
to go through `place`: fresh memory holds NaN, and nothing around what was placed may be touched.
"""

import importlib.util
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kernel_rig import poisoned
from kernel_rig.bounds import BoundedMemory
from paceline_kernels.devices import cpu_stands_for_gpu

CPU = torch.device("cpu")
HAS_TRITON = importlib.util.find_spec("triton") is not None  # it is for Linux
TRITON = pytest.param("triton", marks=pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed"))


def pytest_generate_tests(metafunc):
    """The backends that a test is for."""
    asked = metafunc.fixturenames
    if "backend" not in asked:
        return
    gpus = [TRITON]
    if "dtype" in asked:
        gpus = [pytest.param(f"triton-{kind}", marks=[*TRITON.marks, *marks]) for kind, marks in TYPES_OF_GPUS]
    metafunc.parametrize("backend", gpus if "gpu" in asked else ["cpu", *gpus], indirect=True, scope="session")


# Both that can be relied on: Triton's interpreter computes bfloat16 wrongly, and a GPU takes no float32.
TYPES_OF_GPUS = [("float16", []), ("other", [pytest.mark.slow])]


def pytest_itemcollected(item):
    """The interpreter lets numpy convert arrays of one number, which numpy is about to give up."""
    item.add_marker(pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"))


@dataclass(frozen=True)
class Backend:
    """One implementation of every operation: the CPU's, or the GPU's kernels, interpreted where there is no GPU."""

    is_gpu: bool
    device: torch.device
    dtype: torch.dtype

    @contextmanager
    def memory(self):
        """Within it operations are this implementation's. Returns what copies a tensor to where they may use it."""
        memory = BoundedMemory(self.device)
        with pytest.MonkeyPatch.context() as patch, one_thread():
            if self.is_gpu:
                patch.setattr(torch, "empty", memory.empty)
            if not self.is_gpu or self.device.type == "cuda":
                yield memory.place
            else:
                from triton.runtime.interpreter import InterpreterBuilder

                load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
                patch.setattr(InterpreterBuilder, "create_masked_load", memory.watched_load(load))
                patch.setattr(InterpreterBuilder, "create_masked_store", memory.watched_store(store))
                # Infinity and NaN are results like others: the interpreter computes with numpy, which would warn.
                with cpu_stands_for_gpu(), np.errstate(all="ignore"):
                    yield memory.place
        assert memory.margins_are_untouched()


@contextmanager
def one_thread():
    """So that a busy machine costs no waiting at barriers. Returns what sets another number, for tests of that."""
    from paceline_kernels.compiler import jit

    def set_num_threads(count):
        if jit.max_threads() < count:
            pytest.skip("one core")
        jit.set_num_threads(count)

    before = jit.num_threads()
    jit.set_num_threads(1)
    yield set_num_threads
    jit.set_num_threads(before)


@pytest.fixture
def threads():
    """One thread, until a test asks for more."""
    with one_thread() as set_num_threads:
        yield set_num_threads


@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    """Reading memory before writing it shows in the result."""
    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))


@pytest.fixture(scope="session")
def backend(request):
    """See the module; for kernels a GPU is used if they are compiled, see `TRITON_INTERPRET`."""
    kind, _, dtype = request.param.partition("-")
    if kind == "cpu":
        return Backend(is_gpu=False, device=CPU, dtype=torch.float32)
    import triton

    if triton.knobs.runtime.interpret:
        types = {"": torch.float32, "float16": torch.float16, "other": torch.float32}
        return Backend(is_gpu=True, device=CPU, dtype=types[dtype])
    types = {"": torch.float16, "float16": torch.float16, "other": torch.bfloat16}
    return Backend(is_gpu=True, device=torch.device("cuda"), dtype=types[dtype])


@pytest.fixture(scope="session")
def device(backend):
    """Where the backend's tensors lie."""
    return backend.device


@pytest.fixture(scope="session")
def gpu():
    """Asked for where only GPUs' kernels do what is tested."""


@pytest.fixture(scope="session")
def dtype(backend):
    """Each type that a backend computes in."""
    return backend.dtype


@pytest.fixture(scope="session")
def exact(backend):
    """The type that shows mistakes best."""
    return backend.dtype


@pytest.fixture
def is_gpu(request):
    """Whether a test is of GPUs' kernels: for what every test of a module uses."""
    return "backend" in request.fixturenames and request.getfixturevalue("backend").is_gpu


@pytest.fixture
def place(backend):
    """Copies a tensor to where an operation may use it; what lies around must be untouched when the test ends."""
    with backend.memory() as place:
        yield place


@pytest.fixture
def _products_by_row(monkeypatch):
    """What the interpreter multiplies with: numpy's own product rounds a row by its place in the tile."""
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: np.einsum("ik,kj->ij", a, b, dtype=dtype))

"""A CPU as a device: a thread of its own computes what is launched, in order, while the step thread goes on.

Only one thread of a process may own its OpenMP team, so whatever computes is launched, from the first weight that is
packed on. It looks at what tensors hold, so nothing is captured.
"""

import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import structlog
import torch

from paceline_executor.errors import DeviceError
from paceline_executor.profiling.host_trace import HostProfiler
from paceline_executor.runner.device.device import Uncaptured
from paceline_executor.runner.interface import StepLostError
from paceline_kernels.compiler import jit

# Behind each kernel the compute thread waits for the interpreter while another thread has it, 5 ms by default.
_SWITCH_S = 0.0003

T = TypeVar("T")
_log = structlog.get_logger()
_Work = Callable[[], object]


class HostDevice:
    """See Device. What fails takes everything launched behind it along, until `recover`."""

    is_pinned = False
    is_eager = True

    def __init__(self, num_threads: int, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """num_threads: that compute, the one of this device included."""
        sys.setswitchinterval(_SWITCH_S)
        self.torch_device = torch.device("cpu")
        self.profiler = HostProfiler(clock_ns)
        self._is_guessing = False
        self._shared = shared = _Shared()
        threading.Thread(target=_compute, args=(shared, num_threads), name="compute", daemon=True).start()
        weakref.finalize(self, shared.work.put, None)

    def launch(self, work: _Work) -> None:
        self._shared.num_launched += 1
        self._shared.work.put(partial(_guess, work) if self._is_guessing else work)

    @contextmanager
    def guessing(self) -> Iterator[None]:
        self._is_guessing = True
        try:
            yield
        finally:
            self._is_guessing = False

    def capture(self, work: Callable[[], T]) -> Uncaptured[T]:
        captured = Uncaptured(self, work)
        captured.replay()
        return captured

    def poll(self) -> None:
        if self._shared.error is not None:
            _raise(self._shared.error)

    def wait_until(self, is_there: Callable[[], bool]) -> None:
        shared = self._shared
        with shared.changed:
            shared.changed.wait_for(lambda: shared.error is not None or is_there())
            if not is_there():
                self.poll()

    def synchronize(self) -> None:
        self._drain()
        self.poll()

    def recover(self) -> None:
        self._drain()
        self._shared.error = None

    def run(self, work: Callable[[], T]) -> T:
        """Behind all that was launched. Raises what it raises."""
        outcome = Uncaptured(self, work)
        outcome.replay()
        self._drain()
        error, self._shared.error = self._shared.error, None
        if error is not None:
            raise error
        return outcome.outputs

    def upload(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.array(values))

    def download(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    def _drain(self) -> None:
        shared = self._shared
        with shared.changed:
            shared.changed.wait_for(lambda: shared.num_ended == shared.num_launched)


class _Shared:
    """Apart from the device, which its thread must not keep alive."""

    def __init__(self) -> None:
        self.work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self.changed = threading.Condition()
        self.num_launched = 0  # written by the launching thread alone
        self.num_ended = 0  # written, as the error, by the computing one
        self.error: BaseException | None = None


def _compute(shared: _Shared, num_threads: int) -> None:
    jit.set_num_threads(num_threads)
    torch.set_num_threads(1)  # those of torch would compete with ours
    while (work := shared.work.get()) is not None:
        if shared.error is None:
            try:
                work()
            except BaseException as error:  # whoever waits is told
                shared.error = error
        del work  # what it holds may be a model
        with shared.changed:
            shared.num_ended += 1
            shared.changed.notify_all()


def _guess(work: _Work) -> None:
    """Drafts are guesses: the step goes on without."""
    try:
        work()
    except Exception:
        _log.exception("draft_failed")


def _raise(error: BaseException) -> None:
    if isinstance(error, DeviceError):
        raise error
    raise StepLostError from error

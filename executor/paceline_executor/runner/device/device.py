"""What a runner asks of a device beside its kernels: to launch, to capture and replay, to say what went wrong.

Refuses to know what is launched.
"""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.profiler import ProfilerActivity

from paceline_executor.profiling.profiler import DeviceProfiler
from paceline_executor.profiling.torch_trace import TorchProfiler

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_LOOK_S = 20e-6  # a step takes milliseconds, a look through Python a few microseconds


class Captured(Protocol, Generic[T_co]):
    """It is launched as often as wanted, always over the same tensors."""

    @property
    def outputs(self) -> T_co:
        """Each replay fills these tensors anew; before the first they hold anything."""
        ...

    def replay(self) -> None:
        """Behind all that was launched."""
        ...


class Uncaptured(Generic[T]):
    """The same for what is launched once, one by one."""

    outputs: T  # once it has run

    def __init__(self, device: "Device", work: Callable[[], T]) -> None:
        self._device = device
        self._work = work

    def replay(self) -> None:
        self._device.launch(self._run)

    def _run(self) -> None:
        self.outputs = self._work()


class Capture(Protocol):
    """`Device.capture`, or what stands in for it where nothing is captured."""

    def __call__(self, work: Callable[[], T]) -> Captured[T]: ...


class Device(Protocol):
    """It has one stream: what is launched runs in this order."""

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def is_pinned(self) -> bool:
        """For host memory that the device reads or writes."""
        ...

    @property
    def is_eager(self) -> bool:
        """What is launched may look at what tensors hold."""
        ...

    @property
    def profiler(self) -> DeviceProfiler: ...

    def launch(self, work: Callable[[], object]) -> None:
        """Raises what the work raises, if it is known by then: memory may run out."""
        ...

    def guessing(self) -> AbstractContextManager[None]:
        """What is launched in the block may fail, if the device knows by itself that it did."""
        ...

    def capture(self, work: Callable[[], T]) -> Captured[T]:
        """Runs the work once. It must not look at what tensors hold."""
        ...

    def poll(self) -> None:
        """Lets the device get on for a moment. Raises StepLostError if what was launched has failed, and RuntimeError
        if the device has.
        """
        ...

    def wait_until(self, is_there: Callable[[], bool]) -> None:
        """Until the device has written what is looked for. Raises as `poll` does."""
        ...

    def synchronize(self) -> None:
        """Waits for all that was launched. Raises as `poll` does."""
        ...

    def recover(self) -> None:
        """After a StepLostError: what is launched from now on runs again."""
        ...

    def upload(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        """A copy on the device, there for all that is launched from now on."""
        ...

    def download(self, values: torch.Tensor) -> torch.Tensor:
        """A copy in host memory, there when what is launched later has ended."""
        ...


def capture_filled(device: Device, work: Callable[[], T]) -> Captured[T]:
    """For what the next capture reads: a capture computes nothing, and the run before one takes what lies there."""
    captured = device.capture(work)
    captured.replay()
    return captured


class CudaDevice:
    is_pinned = True
    is_eager = False

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        ranges = torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop
        self.profiler = TorchProfiler((ProfilerActivity.CPU, ProfilerActivity.CUDA), *ranges)
        self._pool = torch.cuda.graph_pool_handle()
        # A pool of graphs ends with its last graph, and cannot be captured into again: this one keeps it.
        self._anchor = torch.cuda.CUDAGraph()
        scratch = torch.zeros(1, device=self.torch_device)
        torch.cuda.synchronize()
        with torch.cuda.graph(self._anchor, pool=self._pool):
            scratch.add_(1)

    def launch(self, work: Callable[[], object]) -> None:
        work()

    def guessing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def capture(self, work: Callable[[], T]) -> Captured[T]:
        """The run before compiles what is missing, which a capture cannot."""
        work()
        torch.cuda.synchronize()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with _no_collection(), torch.cuda.graph(graph, pool=self._pool):
                outputs = work()
        except BaseException:
            torch.cuda.set_stream(stream)  # a capture that fails leaves its own
            raise
        return _CapturedGraph(graph, outputs)

    def poll(self) -> None:
        torch.cuda.current_stream().query()

    def wait_until(self, is_there: Callable[[], bool]) -> None:
        while not is_there():
            self.poll()
            time.sleep(_LOOK_S)

    def recover(self) -> None:
        """Never called: its errors stay."""

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def upload(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        """torch keeps the pinned copy until the device has read it."""
        pinned = torch.from_numpy(np.require(values, requirements="W")).pin_memory()
        return pinned.to(self.torch_device, non_blocking=True)

    def download(self, values: torch.Tensor) -> torch.Tensor:
        return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


@contextmanager
def _no_collection() -> Iterator[None]:
    """A graph that is destroyed meanwhile, as one of an earlier runner may be, spoils the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _CapturedGraph(Generic[T]):
    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: T) -> None:
        self._graph = graph
        self.outputs = outputs

    def replay(self) -> None:
        self._graph.replay()

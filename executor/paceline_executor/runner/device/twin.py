"""A CPU that behaves as a GPU: what is launched runs later, what is captured is replayed over the same tensors.

So the GPU runner can be tested where there is no GPU. What is launched runs as late as it may: only when somebody looks
whether it has ended, and then not always.
"""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass
from random import Random
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.profiler import ProfilerActivity

from paceline_executor.profiling.torch_trace import TorchProfiler
from paceline_executor.runner.device.device import Captured

T = TypeVar("T")

_HASTE = 0.4  # how often a look lets another launch run


class TwinDevice:
    """`fail_next` is raised by the next launch, as when memory runs out; `lost` by whatever comes, as CUDA's errors."""

    is_pinned = False
    is_eager = False

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.profiler = TorchProfiler((ProfilerActivity.CPU,))
        self.fail_next: Exception | None = None
        self.lost: Exception | None = None
        self._random = Random(0)  # noqa: S311, chance is no secret here
        self._launched: deque[Callable[[], object]] = deque()  # as many as the steps in flight take

    def late_by(self, seed: int) -> None:
        self._random.seed(seed)

    def launch(self, work: Callable[[], object]) -> None:
        self._check()
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        self._launched.append(work)

    def guessing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def capture(self, work: Callable[[], T]) -> Captured[T]:
        self.synchronize()
        return _CapturedWork(self, work, work())

    def poll(self) -> None:
        self._check()
        while self._launched and self._random.random() < _HASTE:
            self._launched.popleft()()

    def wait_until(self, is_there: Callable[[], bool]) -> None:
        while not is_there():
            self.poll()

    def recover(self) -> None:
        """Never called: what it loses is lost."""

    def synchronize(self) -> None:
        self._check()
        while self._launched:
            self._launched.popleft()()

    def _check(self) -> None:
        if self.lost is not None:
            raise self.lost

    def upload(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.array(values))

    def download(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone()


class _CapturedWork(Generic[T]):
    def __init__(self, device: TwinDevice, work: Callable[[], T], outputs: T) -> None:
        self._device = device
        self._work = work
        self._outputs = outputs
        self._is_filled = False

    @property
    def outputs(self) -> T:
        """Raises RuntimeError where a GPU would give memory that nothing was written to."""
        if not self._is_filled:
            raise RuntimeError("what is captured is not computed: replay it before its outputs are used")
        return self._outputs

    def replay(self) -> None:
        self._is_filled = True
        self._device.launch(lambda: _fill(self._outputs, self._work()))


def _fill(filled: object, values: object) -> None:
    """As a graph writes to the memory it was captured with."""
    if isinstance(filled, torch.Tensor) and isinstance(values, torch.Tensor):
        filled.copy_(values)
    elif is_dataclass(filled):
        for field in fields(filled):
            _fill(getattr(filled, field.name), getattr(values, field.name))

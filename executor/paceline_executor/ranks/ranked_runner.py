"""The runner of a group: rank 0's own, whose batches go to the others first, and the loop in which they follow.

Nothing that decides a shape is found by a rank for itself: all take the same batches in the same order.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn, Protocol

from paceline_executor.errors import DEVICE_FAILED, DeviceError, DeviceFaultError
from paceline_executor.profiling.profiler import Profiler
from paceline_executor.ranks.messages import Copy, Draw, Message, Prepare
from paceline_executor.runner.device.runner import DeviceRunner
from paceline_executor.runner.interface import (
    CacheGeometry,
    HostTokenLists,
    Int32Array,
    StepBatch,
    StepHandle,
    StepLostError,
    StepMasks,
    StepOutput,
)

_NEXT_S = 0.02
"""A follower expects the next step for so long before it waits for the one that runs."""


class Checks(Protocol):
    def landed(self, step: int, output: StepOutput) -> None: ...


@dataclass(frozen=True, slots=True)
class _RankedStep:
    number: int  # of the group's, from 0 on
    handle: StepHandle


class RankedRunner:
    """See `runner.interface.Runner`. What fails here has begun elsewhere: the device has failed."""

    def __init__(
        self, own: DeviceRunner, geometry: CacheGeometry, tell: Callable[[Message], None], guard: Checks
    ) -> None:
        """geometry: of all ranks together."""
        self._own = own
        self._geometry = geometry
        self._tell = tell
        self._guard = guard
        self._num_steps = 0

    @property
    def max_in_flight(self) -> int:
        return self._own.max_in_flight

    @property
    def kv_geometry(self) -> CacheGeometry:
        return self._geometry

    @property
    def profiler(self) -> Profiler:
        return self._own.profiler

    def warm_up(self) -> tuple[tuple[int, int], ...]:
        """How many steps are measured depends on what the first take, so rank 0 alone decides."""
        self._tell(Prepare())
        self._own.capture()
        return self._own.measure(lambda batch: self.wait(self.launch(batch)))

    def launch(self, batch: StepBatch) -> StepHandle:
        self._tell(batch)
        with _for_all():
            step = _RankedStep(self._num_steps, self._own.launch(batch))
        self._num_steps += 1
        return step

    def drafts(self, handle: StepHandle) -> HostTokenLists | None:
        with _for_all():
            return self._own.drafts(_step(handle).handle)

    def draw(self, handle: StepHandle, masks: StepMasks | None) -> None:
        self._tell(Draw(masks))
        with _for_all():
            self._own.draw(_step(handle).handle, masks)

    def is_done(self, handle: StepHandle) -> bool:
        return self._own.is_done(_step(handle).handle)

    def wait(self, handle: StepHandle) -> StepOutput:
        step = _step(handle)
        with _for_all():
            output = self._own.wait(step.handle)
        self._guard.landed(step.number, output)
        return output

    def copy_blocks(self, sources: Int32Array, destinations: Int32Array) -> None:
        self._tell(Copy(sources, destinations))
        with _for_all():
            self._own.copy_blocks(sources, destinations)


class FollowingRank:
    """Any other rank."""

    def __init__(self, own: DeviceRunner, checks: Checks) -> None:
        self._own = own
        self._checks = checks
        self._in_flight: deque[_RankedStep] = deque()
        self._num_steps = 0
        self._is_to_draw = False  # the step launched last

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def follow(self, read: Callable[[float | None], Message | None]) -> NoReturn:
        """read: the next message; None where none came for so many seconds."""
        while True:
            can_land = len(self._in_flight) > self._is_to_draw
            message = read(_NEXT_S if can_land else None)
            if message is None:
                self.land()
            else:
                self.take(message)

    def take(self, message: Message) -> None:
        match message:
            case Prepare():
                self._own.capture()
            case Copy(sources, destinations):
                self._own.copy_blocks(sources, destinations)
            case StepBatch():
                if len(self._in_flight) == self._own.max_in_flight:
                    self.land()
                self._in_flight.append(_RankedStep(self._num_steps, self._own.launch(message)))
                self._num_steps += 1
                self._is_to_draw = bool(message.is_masked)
            case Draw(masks):
                self._own.draw(self._in_flight[-1].handle, masks)
                self._is_to_draw = False

    def land(self) -> None:
        step = self._in_flight.popleft()
        self._checks.landed(step.number, self._own.wait(step.handle))


@contextmanager
def _for_all() -> Iterator[None]:
    try:
        yield
    except DeviceError:
        raise
    except Exception as error:
        cause = error.__cause__ if isinstance(error, StepLostError) else error
        raise DeviceFaultError(DEVICE_FAILED) from cause


def _step(handle: StepHandle) -> _RankedStep:
    if not isinstance(handle, _RankedStep):
        raise TypeError(f"a step is waited for by the handle of its launch, not by {handle!r}")
    return handle

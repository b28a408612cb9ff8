"""A runner that behaves as a device which computes on its own: nothing is known of a step until it is waited for.

Around any runner that computes in `launch`. What that one drew is kept back; whether a step is done is said late and at
random. Tests that pass on it show that nobody reads what has not landed.
"""

from collections import deque
from dataclasses import dataclass
from random import Random

from paceline_executor.profiling.profiler import Profiler
from paceline_executor.runner.interface import (
    CacheGeometry,
    HostTokenLists,
    Int32Array,
    Runner,
    StepBatch,
    StepHandle,
    StepMasks,
    StepOutput,
)

MAX_IN_FLIGHT = 4
_LATENESS = 0.7  # how often a step that could be told is said not to be done


@dataclass(eq=False)
class _Hidden:
    """It was computed and nobody may know. None: it has still to draw."""

    handle: StepHandle
    output: StepOutput | None


class HidingRunner:
    """Several steps are in flight around a runner that has one.

    `lose_next` is raised by the next `wait`, as when a device fails while it computes.
    """

    def __init__(self, inner: Runner, seed: int = 0, max_in_flight: int = MAX_IN_FLIGHT) -> None:
        self._inner = inner
        self._random = Random(seed)  # noqa: S311, chance in tests is no secret
        self._max_in_flight = max_in_flight
        self._hidden: deque[_Hidden] = deque()
        self.lose_next: Exception | None = None
        self.deepest = 0  # how many steps were in flight at most

    @property
    def max_in_flight(self) -> int:
        return self._max_in_flight

    @property
    def kv_geometry(self) -> CacheGeometry:
        return self._inner.kv_geometry

    @property
    def profiler(self) -> Profiler:
        return self._inner.profiler

    def warm_up(self) -> tuple[tuple[int, int], ...]:
        return self._inner.warm_up()

    def copy_blocks(self, sources: Int32Array, destinations: Int32Array) -> None:
        """It runs in order with the steps."""
        self._inner.copy_blocks(sources, destinations)

    def launch(self, batch: StepBatch) -> StepHandle:
        if len(self._hidden) >= self._max_in_flight:
            raise AssertionError("more steps are launched than this device has room for")
        handle = self._inner.launch(batch)
        self._hidden.append(_Hidden(handle, None if batch.is_masked else self._inner.wait(handle)))
        self.deepest = max(self.deepest, len(self._hidden))
        return self._hidden[-1]

    def drafts(self, handle: StepHandle) -> HostTokenLists | None:
        hidden = self._hidden[-1]
        if handle is not hidden:
            raise AssertionError("only the step launched last may have still to draw")
        return self._inner.drafts(hidden.handle)

    def draw(self, handle: StepHandle, masks: StepMasks | None) -> None:
        hidden = self._hidden[-1]
        if handle is not hidden or len(self._hidden) > 1:
            raise AssertionError("the step launched last draws when those before it have landed")
        self._inner.draw(hidden.handle, masks)
        hidden.output = self._inner.wait(hidden.handle)

    def is_done(self, handle: StepHandle) -> bool:
        self._check_oldest(handle)
        return self._random.random() > _LATENESS

    def wait(self, handle: StepHandle) -> StepOutput:
        self._check_oldest(handle)
        hidden = self._hidden.popleft()
        if self.lose_next is not None:
            error, self.lose_next = self.lose_next, None
            raise error
        if hidden.output is None:
            raise AssertionError("a step that has not drawn is waited for")
        return hidden.output

    def _check_oldest(self, handle: StepHandle) -> None:
        if not self._hidden or handle is not self._hidden[0]:
            raise AssertionError("steps are waited for in the order of their launches")

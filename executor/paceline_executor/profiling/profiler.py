"""What is asked of whoever records steps.

Apart from those who do: a device brings its own, and the step thread knows neither.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

MAX_PART_BYTES = 1024 * 1024
MAX_NUM_STEPS = 1000


@dataclass(frozen=True, slots=True)
class StepMark:
    """A step that has been told, on the monotonic clock."""

    step_id: int
    num_rows: int
    num_tokens: int
    predicted_ns: int
    waited_ns: int  # its plan lay ready
    idle_ns: int  # nothing ran before it
    start_ns: int
    end_ns: int


class Profiler(Protocol):
    """For the step thread where nothing else is said; any thread may look whether it `is_on`."""

    @property
    def is_on(self) -> bool: ...

    @property
    def num_steps(self) -> int: ...

    def prepare(self) -> None:
        """By another thread, before `start`: the first time it may take seconds."""
        ...

    def start(self, num_steps: int) -> None:
        """Record so many steps, then stop. What it had is discarded."""
        ...

    def span(self, name: str) -> AbstractContextManager[None]:
        """What the step thread does in the block; next to free while it is off."""
        ...

    def end_step(self, mark: StepMark) -> None:
        """A step has been told; outside of all spans."""
        ...

    def stop(self) -> None: ...

    def read(self) -> bytes | None:
        """By any thread: the next part of a Chrome trace in JSON, of at most MAX_PART_BYTES. Empty: nothing yet; None,
        after the stop: that was all.
        """
        ...

    def rates(self) -> dict[str, float]:
        """By any thread, between the stop and the last part: bytes per second, by kind of kernel."""
        ...

    def discard(self) -> None:
        """By any thread, after the stop: forget the rest of the trace."""
        ...


class DeviceProfiler(Profiler, Protocol):
    """What a device's runner tells it, of each step that has landed."""

    def add_bytes(self, kind: str, num_bytes: int) -> None:
        """What kernels of a kind cannot do without reading."""
        ...

    def add_times(self, begun_ns: int, forwarded_ns: int, ended_ns: int) -> None:
        """By the device's clock."""
        ...

"""Records steps that are computed by this process: what its step thread does, what its compute thread does meanwhile,
and what compiled code says of itself.

Events are kept until they are read, and at most so many. Knows the Chrome trace format
(https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU). Times are microseconds since the
start.
"""

import json
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import NamedTuple

from paceline_executor.profiling.bandwidth import achieved
from paceline_executor.profiling.profiler import MAX_PART_BYTES, StepMark

_MAX_EVENTS = 300_000  # a thousand steps of a model of 40 layers
_MAX_REST_BYTES = 4096  # of a part: an event, and what the first or last one has besides
_THREAD, _COMPUTE, _STEPS = 1, 2, 3  # tracks; steps that are in flight together have one each
_MAX_LANES = 2  # of them; more are numbered only
_OFF: AbstractContextManager[None] = nullcontext()


class _Event(NamedTuple):
    category: str
    name: str
    track: int
    start_ns: int
    end_ns: int
    args: dict[str, int]


class HostProfiler:
    """See `Profiler`."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """clock_ns: whose times the runner and the step loop tell, too."""
        self._clock_ns = clock_ns
        self._events: deque[_Event] = deque()
        self._is_on = False
        self._has_begun = False  # the first part was read
        self._has_ended = True  # and the last
        self._start_ns = 0
        self._num_wanted = 0
        self._num_steps = 0
        self._lanes: list[int] = []  # when the last step on each track of steps ended
        self._seconds: dict[str, float] = {}
        self._num_bytes: dict[str, int] = {}

    @property
    def is_on(self) -> bool:
        return self._is_on

    @property
    def num_steps(self) -> int:
        return self._num_steps

    def prepare(self) -> None:
        return

    def start(self, num_steps: int) -> None:
        self._events.clear()
        self._start_ns = self._clock_ns()
        self._num_wanted, self._num_steps = num_steps, 0
        self._lanes, self._seconds, self._num_bytes = [], {}, {}
        self._has_begun = self._has_ended = False
        self._is_on = True

    def span(self, name: str) -> AbstractContextManager[None]:
        return _Span(self, name, self._clock_ns) if self._is_on else _OFF

    def add(self, name: str, start_ns: int, end_ns: int, track: int = _THREAD) -> None:
        self._events.append(_Event("phase", name, track, start_ns, end_ns, {}))

    def add_bytes(self, kind: str, num_bytes: int) -> None:
        """Its kernels tell their own."""

    def add_times(self, begun_ns: int, forwarded_ns: int, ended_ns: int) -> None:
        """See DeviceProfiler."""
        if begun_ns >= self._start_ns:
            self.add("forward", begun_ns, forwarded_ns, _COMPUTE)
            self.add("draw", forwarded_ns, ended_ns, _COMPUTE)

    def add_kernel(self, name: str, layer: int, start_ns: int, end_ns: int, num_bytes: int) -> None:
        """num_bytes: what it cannot do without reading."""
        args = {"layer": layer, "bytes": num_bytes} if num_bytes else {"layer": layer}
        self._events.append(_Event("kernel", name, _COMPUTE, start_ns, end_ns, args))
        self._seconds[name] = self._seconds.get(name, 0.0) + (end_ns - start_ns) / 1e9
        self._num_bytes[name] = self._num_bytes.get(name, 0) + num_bytes

    def end_step(self, mark: StepMark) -> None:
        if not self._is_on or mark.start_ns < self._start_ns:
            return
        if mark.idle_ns:
            self.add("wait for a plan", max(self._start_ns, mark.start_ns - mark.idle_ns), mark.start_ns)
        args = {
            "step_id": mark.step_id,
            "rows": mark.num_rows,
            "tokens": mark.num_tokens,
            "predicted_us": mark.predicted_ns // 1000,
            "plan_waited_us": mark.waited_ns // 1000,
        }
        name, track = f"step {mark.step_id}", _STEPS + self._lane(mark)
        self._events.append(_Event("step", name, track, mark.start_ns, mark.end_ns, args))
        self._num_steps += 1
        if self._num_steps == self._num_wanted or len(self._events) >= _MAX_EVENTS:
            self._is_on = False

    def stop(self) -> None:
        self._is_on = False

    def read(self) -> bytes | None:
        """See `Profiler`. An event is a line; the first part is there at once."""
        if self._has_ended:
            return None
        may_end = not self._is_on  # asked first: nothing is put in after it was switched off
        text, self._has_begun = "" if self._has_begun else _head(), True
        lines: list[str] = []
        num_bytes = len(text)
        while self._events and num_bytes < MAX_PART_BYTES - _MAX_REST_BYTES:
            lines.append(",\n" + _json(self._events.popleft(), self._start_ns))
            num_bytes += len(lines[-1])
        self._has_ended = may_end and not self._events
        tail = f'\n],"otherData":{{"num_steps":{self._num_steps}}}}}\n' if self._has_ended else ""
        return "".join((text, *lines, tail)).encode()

    def rates(self) -> dict[str, float]:
        return achieved(self._seconds.items(), self._num_bytes)

    def discard(self) -> None:
        self._events.clear()
        self._has_ended = True

    def _lane(self, mark: StepMark) -> int:
        """Its last step had ended when this one began."""
        free = (lane for lane, ended_ns in enumerate(self._lanes) if ended_ns <= mark.start_ns)
        lane = next(free, len(self._lanes))
        self._lanes[lane : lane + 1] = [mark.end_ns]
        return lane


class _Span:
    __slots__ = ("_clock_ns", "_name", "_profiler", "_start_ns")

    def __init__(self, profiler: HostProfiler, name: str, clock_ns: Callable[[], int]) -> None:
        self._profiler = profiler
        self._name = name
        self._clock_ns = clock_ns

    def __enter__(self) -> None:
        self._start_ns = self._clock_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._profiler.add(self._name, self._start_ns, self._clock_ns())


def _head() -> str:
    """Up to the names of process and tracks."""
    pid = os.getpid()
    names = [("process_name", 0, "paceline-executor"), ("thread_name", _THREAD, "step thread")]
    names.append(("thread_name", _COMPUTE, "compute thread"))
    names += [("thread_name", _STEPS + lane, f"steps {lane}") for lane in range(_MAX_LANES)]
    events = (
        {"ph": "M", "name": name, "pid": pid, "tid": track, "ts": 0, "args": {"name": value}}
        for name, track, value in names
    )
    return '{"displayTimeUnit":"ms","traceEvents":[\n' + ",\n".join(json.dumps(event) for event in events)


def _json(event: _Event, origin_ns: int) -> str:
    category, name, track, start_ns, end_ns, args = event
    times = {"ts": (start_ns - origin_ns) / 1000, "dur": (end_ns - start_ns) / 1000}
    return json.dumps(
        {"ph": "X", "cat": category, "name": name, "pid": os.getpid(), "tid": track} | times | {"args": args},
        separators=(",", ":"),
    )

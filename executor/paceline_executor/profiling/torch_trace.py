"""Records steps that a device computes: torch.profiler's trace, and ranges for NVIDIA's own tools.

Apart from `host_trace`, since torch takes seconds to import. Knows the trace as a file without a name.
"""

import io
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

from torch.profiler import ProfilerActivity, profile, record_function, schedule

from paceline_executor.profiling.bandwidth import achieved, kernel_times, num_traced_steps
from paceline_executor.profiling.profiler import MAX_PART_BYTES, StepMark

_OFF: AbstractContextManager[None] = nullcontext()
_NUM_WARM_UP_STEPS = 1  # torch.profiler's own first step is slow
# A longer one takes a second to parse, and nobody hears of this process meanwhile.
_MAX_PARSED_BYTES = 16 * 1024 * 1024
_NO_STEP = b'{"traceEvents":[]}\n'


class TorchProfiler:
    """See `Profiler`. A step more than asked for runs, before those that are recorded."""

    def __init__(
        self,
        activities: Sequence[ProfilerActivity],
        push_range: Callable[[str], object] = lambda _: None,
        pop_range: Callable[[], object] = lambda: None,
    ) -> None:
        """push_range, pop_range: told of each span, as those of `torch.cuda.nvtx` are."""
        self._activities = list(activities)
        self._push_range = push_range
        self._pop_range = pop_range
        self._torch: Any = None  # of no type that is public
        self._is_on = False
        self._is_prepared = False
        self._num_wanted = 0
        self._num_ended = 0
        self._num_bytes: dict[str, int] = {}
        self._trace: BinaryIO | None = None

    @property
    def is_on(self) -> bool:
        return self._is_on

    @property
    def num_steps(self) -> int:
        return max(0, self._num_ended - _NUM_WARM_UP_STEPS)

    def prepare(self) -> None:
        """What the first start does beside: hundreds of modules are imported, and CUDA's own profiler begins."""
        if not self._is_prepared:
            with profile(activities=self._activities):
                pass
            self._is_prepared = True

    def start(self, num_steps: int) -> None:
        self.discard()
        self._num_wanted, self._num_ended, self._num_bytes = num_steps, 0, {}
        steps = schedule(wait=0, warmup=_NUM_WARM_UP_STEPS, active=num_steps, repeat=1)
        self._torch = profile(activities=self._activities, schedule=steps, on_trace_ready=self._keep)
        self._torch.start()
        self._is_on = True

    def span(self, name: str) -> AbstractContextManager[None]:
        return self._range(name) if self._is_on else _OFF

    def add_bytes(self, kind: str, num_bytes: int) -> None:
        """See DeviceProfiler."""
        self._num_bytes[kind] = self._num_bytes.get(kind, 0) + num_bytes

    def add_times(self, begun_ns: int, forwarded_ns: int, ended_ns: int) -> None:
        """torch.profiler has the times of its kernels."""

    def end_step(self, mark: StepMark) -> None:  # noqa: ARG002  torch.profiler numbers steps itself
        if not self._is_on:
            return
        self._num_ended += 1
        if self._num_ended == _NUM_WARM_UP_STEPS:
            self._num_bytes = {}
        self._torch.step()
        if self.num_steps == self._num_wanted:
            self.stop()

    def stop(self) -> None:
        if self._is_on:
            self._torch.stop()
            self._torch = None
            self._trace = self._trace or io.BytesIO(_NO_STEP)
            self._is_on = False  # last: readers wait for it

    def read(self) -> bytes | None:
        if self._is_on:
            return b""
        part = b"" if self._trace is None else self._trace.read(MAX_PART_BYTES - 1024)
        if not part:
            self.discard()
        return part or None

    def rates(self) -> dict[str, float]:
        """Empty for a trace too large to be looked through, and for one without a step's kernels."""
        if self._trace is None:
            return {}
        read_to = self._trace.tell()  # who asked whether it is on just before it ended has the first part
        self._trace.seek(0)
        text = self._trace.read(_MAX_PARSED_BYTES + 1)
        self._trace.seek(read_to)
        if len(text) > _MAX_PARSED_BYTES:
            return {}
        events = json.loads(text)["traceEvents"]
        steps = num_traced_steps(events) / max(1, self.num_steps)
        return achieved(kernel_times(events), {kind: int(steps * size) for kind, size in self._num_bytes.items()})

    def discard(self) -> None:
        if self._trace is not None:
            self._trace.close()
            self._trace = None

    @contextmanager
    def _range(self, name: str) -> Iterator[None]:
        self._push_range(name)
        try:
            with record_function(name):
                yield
        finally:
            self._pop_range()

    def _keep(self, finished: Any) -> None:  # noqa: ANN401  as above
        with tempfile.TemporaryDirectory(prefix="paceline-profile-") as folder:
            file = Path(folder) / "trace.json"
            finished.export_chrome_trace(str(file))
            self._trace = file.open("rb")

"""Cores whose recordings stay in memory: one that is driven event by event, and those of a simulated system."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from both_sides.audited import AuditedExecutor
from both_sides.harness import CoreHarness
from paceline.plan.values import BatchPlan
from paceline_scheduler.core.core import Core
from paceline_scheduler.core.events import Effects, Event, ReplyT
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.errors import SchedulerError
from paceline_scheduler.recording import wire
from paceline_scheduler.recording.file_writer import FileBounds, RecordMaker
from paceline_scheduler.recording.recorder import Recorder
from paceline_scheduler.recording.replay import Recording
from simulation.run import run_world
from simulation.scenario import draw_scenario
from simulation.trace import Trace
from simulation.world import LIMITS, World


class MemoryFiles:
    """A Writer whose files are bytes. Records are made when so many wait, or somebody looks."""

    def __init__(self, num_waiting: int) -> None:
        self.failure: str | None = None
        self._num_waiting = num_waiting
        self._files: dict[str, bytearray] = {}
        self._waiting: list[tuple[bytearray, RecordMaker]] = []
        self._newest = bytearray()
        self._head_bytes = 0

    @property
    def files(self) -> dict[str, bytearray]:
        """By name, with all that was taken."""
        for data, record in self._waiting:
            data += record()
        self._waiting.clear()
        return self._files

    @property
    def num_file_bytes(self) -> int:
        """What is written behind the head of the newest."""
        return len(self._newest) - self._head_bytes

    def begin(self, path: Path, head: RecordMaker) -> None:
        """Begin a file; two of a second have different numbers."""
        assert path.name not in self._files, "every file has its own name"
        self._newest = bytearray(head())
        self._head_bytes = len(self._newest)
        self._files[path.name] = self._newest

    def write(self, record: RecordMaker, num_bytes: int) -> None:
        """Take all."""
        assert num_bytes > 0
        self._waiting.append((self._newest, record))
        if len(self._waiting) > self._num_waiting:
            assert self.files

    def end(self) -> None:
        """Keep them."""

    def join(self) -> None:
        """Nothing is waited for."""


class Recordings:
    """Makes recorders, and reads what they wrote. A file is full with `max_file_bytes`."""

    def __init__(self, *, is_raw: bool, max_file_bytes: int = 1 << 30, num_waiting: int = 0) -> None:
        self._is_raw = is_raw
        self._bounds = FileBounds(max_file_bytes=max_file_bytes)
        self._num_waiting = num_waiting
        self._writers: list[MemoryFiles] = []

    def recorder(self, core: Core) -> Recorder:

        recorder = Recorder(lambda: core.state, Path(), "scheduler-1", self._bounds, lambda: 0.0, self._open)
        recorder.start("test", is_raw=self._is_raw)
        return recorder

    def _open(self, *_: object) -> MemoryFiles:
        self._writers.append(MemoryFiles(self._num_waiting))
        return self._writers[-1]

    def files(self) -> list[bytes]:
        return [bytes(data) for writer in self._writers for data in writer.files.values()]

    def read(self) -> Iterator[Recording]:
        for data in self.files():
            header, *records = wire.decode(data)
            assert isinstance(header, wire.Header), "files begin with one"
            yield Recording(header, tuple(records))


class RecordedCore(Core):
    """A core that is recorded as a runtime would show it."""

    def __init__(self, limits: CoreLimits, recordings: Iterable[Recordings]) -> None:
        super().__init__(limits)
        self._recorders = [each.recorder(self) for each in recordings]

    def apply(self, event: Event[ReplyT], now: float) -> Effects[ReplyT]:
        try:
            effects = super().apply(event, now)
        except SchedulerError as error:
            for recorder in self._recorders:
                recorder.refused(event, now, error)
            raise
        for recorder in self._recorders:
            recorder.saw(event, now, effects)
        return effects

    def plan(self, address: str, now: float) -> BatchPlan | None:
        plan = super().plan(address, now)
        for recorder in self._recorders:
            recorder.planned(address, now, plan, 0)
        return plan


class RecordedHarness(CoreHarness):
    """A CoreHarness whose cores are recorded, in several ways at once."""

    def __init__(
        self, recordings: Sequence[Recordings], *executors: AuditedExecutor, limits: CoreLimits | None = None
    ) -> None:
        self._recordings = recordings
        super().__init__(*executors, limits=limits)

    def new_core(self) -> Core:
        return RecordedCore(self.limits, self._recordings)


def record_seed(seed: int, recordings: Recordings) -> None:
    """Run what a seed of the simulation stands for; each of its schedulers is recorded."""
    trace = Trace(is_kept_whole=False)
    world = World(draw_scenario(seed), trace)
    for host in world.schedulers:
        host.new_core = lambda: RecordedCore(LIMITS, [recordings])
    outcome = run_world(world, trace)
    assert not outcome.failures, outcome.failures

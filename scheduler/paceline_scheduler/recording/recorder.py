"""Records what goes into the core and what it plans: an observer of the runtime that looks at nothing else.

Writes each record at once into memory, from which a thread of `file_writer` takes it. Whatever goes wrong ends the
recording, with one line in the log, and nothing else.
"""

import contextlib
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import structlog

from paceline.plan.values import BatchPlan
from paceline_scheduler.core.events import Effects, Event
from paceline_scheduler.core.state import CoreState
from paceline_scheduler.errors import InvalidRequestError, SchedulerError
from paceline_scheduler.recording import wire
from paceline_scheduler.recording.file_writer import SUFFIX, FileBounds, FileWriter
from paceline_scheduler.recording.masking import Mask, Masked, Plain
from paceline_scheduler.recording.wire import Header

_MAX_WRITERS = 8
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_log = structlog.get_logger(__name__)


class Writer(Protocol):
    """Takes bytes for one file after another; with a `failure` it takes none."""

    failure: str | None

    def begin(self, path: Path) -> None: ...

    def write(self, data: bytes) -> None: ...

    def end(self) -> None: ...

    def join(self) -> None: ...


OpenWriter = Callable[[Path, FileBounds, Callable[[str | None, int], None]], Writer]


@dataclass(slots=True)
class _Recording:
    """One that runs."""

    name: str
    mask: Mask
    number: int = 0  # of its file
    num_bytes: int = 0  # of that file
    num_records: int = 0

    def ended(self, failure: str | None, num_lost_bytes: int) -> None:
        """Log what became of it, from any thread."""
        counts = {"name": self.name, "num_files": self.number, "num_records": self.num_records}
        if failure is None:
            _log.info("recording_ended", **counts)
        else:
            _log.warning("recording_stopped", reason=failure, num_lost_bytes=num_lost_bytes, **counts)


class Recorder:
    """A RefusalObserver. `state` is the core's, `folder` where files go; `wall_s` gives seconds since 1970."""

    def __init__(
        self,
        state: Callable[[], CoreState],
        folder: Path,
        scheduler_id: str,
        bounds: FileBounds | None = None,
        wall_s: Callable[[], float] = time.time,
        open_writer: OpenWriter = FileWriter,
    ) -> None:
        self._state = state
        self._folder = folder
        self._scheduler_id = scheduler_id
        self._bounds = bounds or FileBounds()
        self._wall_s = wall_s
        self._open_writer = open_writer
        self._recording: _Recording | None = None
        self._writer: Writer | None = None  # of that one, or of the last
        self._writers: deque[Writer] = deque(maxlen=_MAX_WRITERS)  # that may still write

    def start(self, name: str, *, is_raw: bool) -> None:
        """Begin a recording, and end the one before. Raises InvalidRequestError for a name that is none."""
        if not _NAME.fullmatch(name):
            raise InvalidRequestError("name", "has to be 1 to 64 letters, digits, - and _")
        self.stop()
        recording = self._recording = _Recording(name, Plain() if is_raw else Masked(self._state))
        self._writer = self._open_writer(self._folder, self._bounds, recording.ended)
        self._writers.append(self._writer)
        with self._given_up_on_failure():
            self._begin_file(recording)
        _log.info("recording_started", name=name, folder=str(self._folder), is_raw=is_raw)

    def stop(self) -> None:
        """End the recording, if there is one. The log says when all of it is written."""
        if self._recording is None or self._writer is None:
            return
        with self._given_up_on_failure():
            self._write(self._recording.mask.last())
        self._recording = None
        self._writer.end()

    def close(self) -> None:
        """End the recording and wait until it is written, a few seconds at most."""
        self.stop()
        for writer in self._writers:
            writer.join()

    def saw(self, event: Event[Any], now: float, effects: Effects[Any]) -> None:
        if self._recording is not None:
            with self._given_up_on_failure():
                self._write(self._recording.mask.event(event, now, effects.reply))

    def refused(self, event: Event[Any], now: float, error: SchedulerError) -> None:
        if self._recording is not None:
            with self._given_up_on_failure():
                self._write(self._recording.mask.refused(event, now, error))

    def planned(self, address: str, now: float, plan: BatchPlan | None, planning_ns: int) -> None:
        del planning_ns
        if self._recording is not None:
            with self._given_up_on_failure():
                self._write(self._recording.mask.planning(address, now, plan))

    def _write(self, records: bytes) -> None:
        recording, writer = self._recording, self._writer
        if recording is None or writer is None:
            return
        writer.write(records)
        recording.num_records += 1
        recording.num_bytes += len(records)
        if writer.failure is not None:
            self._recording = None
        elif recording.num_bytes > self._bounds.max_file_bytes:
            writer.write(recording.mask.last())
            self._begin_file(recording)

    def _begin_file(self, recording: _Recording) -> None:
        """Begin a file with all that the core knows: each can be read without those before."""
        assert self._writer is not None, "it is open while something is recorded"
        recording.number += 1
        begun_s = self._wall_s()
        stamp = datetime.fromtimestamp(begun_s, UTC).strftime("%Y%m%dT%H%M%S")
        self._writer.begin(self._folder / f"{recording.name}-{stamp}-{recording.number:04}{SUFFIX}")
        form = recording.mask.form
        header = Header(version("paceline"), self._scheduler_id, form, begun_s, recording.number)
        records = wire.encode_header(header) + recording.mask.state(self._state())
        recording.num_bytes = 0
        self._writer.write(records)

    @contextlib.contextmanager
    def _given_up_on_failure(self) -> Iterator[None]:
        """Serving goes on whatever becomes of the recording."""
        try:
            yield
        except Exception:
            recording, self._recording = self._recording, None
            _log.exception("recording_failed", name=None if recording is None else recording.name)
            if self._writer is not None:
                self._writer.end()

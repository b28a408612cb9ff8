"""Records what goes into the core and what it plans: an observer of the runtime that looks at nothing else.

Keeps events, results and plans as they are, which never change, for a thread of `file_writer` that makes records of
them. Whatever goes wrong ends the recording, with one line in the log, and nothing else.
"""

import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ParamSpec, Protocol

import structlog

from paceline.plan.values import BatchPlan
from paceline_scheduler.core.events import Effects, Event, Resume, Submit
from paceline_scheduler.core.state import CoreState
from paceline_scheduler.errors import InvalidRequestError, SchedulerError
from paceline_scheduler.recording import wire
from paceline_scheduler.recording.file_writer import SUFFIX, FileBounds, FileWriter, RecordMaker
from paceline_scheduler.recording.masking import Mask, Masked, Plain
from paceline_scheduler.recording.wire import Header, TokenForm

_MAX_WRITERS = 8
_RECORD_BYTES = 4096  # about what a waiting record holds without prompts
_P = ParamSpec("_P")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_log = structlog.get_logger(__name__)


class Writer(Protocol):
    """Takes records for one file after another; with a `failure` it takes none."""

    failure: str | None

    @property
    def num_file_bytes(self) -> int: ...

    def begin(self, path: Path, head: RecordMaker) -> None: ...

    def write(self, record: RecordMaker, num_bytes: int) -> None: ...

    def end(self) -> None: ...

    def join(self) -> None: ...


OpenWriter = Callable[[Path, FileBounds, Callable[[str | None, int], None]], Writer]


@dataclass(slots=True)
class _Recording:
    name: str
    mask: Mask
    number: int = 0  # of its file
    num_records: int = 0

    def ended(self, failure: str | None, num_lost_records: int) -> None:
        """Called from any thread."""
        counts = {"name": self.name, "num_files": self.number, "num_records": self.num_records}
        if failure is None:
            _log.info("recording_ended", **counts)
        else:
            _log.warning("recording_stopped", reason=failure, num_lost_records=num_lost_records, **counts)


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
        if not _NAME.fullmatch(name):
            raise InvalidRequestError("name", "has to be 1 to 64 letters, digits, - and _")
        self.stop()
        recording = self._recording = _Recording(name, Plain() if is_raw else Masked(self._state))
        self._writer = self._open_writer(self._folder, self._bounds, recording.ended)
        self._writers.append(self._writer)
        try:
            self._begin_file(recording)
        except Exception:
            self._give_up()
        _log.info("recording_started", name=name, folder=str(self._folder), is_raw=is_raw)

    def stop(self) -> None:
        """The log says when all of it is written."""
        if self._recording is None or self._writer is None:
            return
        self._record(_RECORD_BYTES, self._recording.mask.last)
        self._recording = None
        self._writer.end()

    def close(self) -> None:
        """Waits until it is written, a few seconds at most."""
        self.stop()
        for writer in self._writers:
            writer.join()

    def saw(self, event: Event[Any], now: float, effects: Effects[Any]) -> None:
        if self._recording is not None:
            self._record(_num_bytes(event), self._recording.mask.event, event, now, effects.reply)

    def refused(self, event: Event[Any], now: float, error: SchedulerError) -> None:
        if self._recording is not None:
            self._record(_num_bytes(event), self._recording.mask.refused, event, now, error)

    def planned(self, address: str, now: float, plan: BatchPlan | None, planning_ns: int) -> None:
        del planning_ns
        if self._recording is not None:
            self._record(_RECORD_BYTES, self._recording.mask.planning, address, now, plan)

    def _record(self, num_bytes: int, prepare: Callable[_P, RecordMaker], *args: _P.args, **kwargs: _P.kwargs) -> None:
        recording, writer = self._recording, self._writer
        if recording is None or writer is None:
            return
        try:
            writer.write(prepare(*args, **kwargs), num_bytes)
            recording.num_records += 1
            if writer.failure is not None:
                self._recording = None
            elif writer.num_file_bytes > self._bounds.max_file_bytes:
                writer.write(recording.mask.last(), _RECORD_BYTES)
                self._begin_file(recording)
        except Exception:
            self._give_up()

    def _begin_file(self, recording: _Recording) -> None:
        """Each file can be read without those before."""
        assert self._writer is not None, "it is open while something is recorded"
        recording.number += 1
        begun_s = self._wall_s()
        stamp = datetime.fromtimestamp(begun_s, UTC).strftime("%Y%m%dT%H%M%S")
        number = recording.number
        path = self._folder / f"{recording.name}-{stamp}-{number:04}{SUFFIX}"
        state = recording.mask.state(self._state())
        self._writer.begin(path, lambda: _header(self._scheduler_id, recording.mask.form, begun_s, number) + state)

    def _give_up(self) -> None:
        """Serving goes on whatever becomes of the recording."""
        recording, self._recording = self._recording, None
        _log.exception("recording_failed", name=None if recording is None else recording.name)
        if self._writer is not None:
            self._writer.end()


def _header(scheduler_id: str, form: TokenForm, begun_s: float, number: int) -> bytes:
    from importlib.metadata import version  # takes 15 ms of a start

    return wire.encode_header(Header(version("paceline"), scheduler_id, form, begun_s, number))


def _num_bytes(event: Event[Any]) -> int:
    """Return about what is kept in memory for it."""
    match event:
        case Submit(requests) | Resume(requests):
            return _RECORD_BYTES + sum(request.prompt_token_ids.nbytes for request in requests)
    return _RECORD_BYTES

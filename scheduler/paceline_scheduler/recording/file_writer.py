"""Makes and writes the records of a recording in a thread of its own: a slow or full disk never keeps the event loop
waiting, and records made one after another cost a tenth of those made between two steps, whose caches are cold.

Knows bytes and files, and bounds for both. Refuses to know what the bytes say.
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

SUFFIX = ".recording"
_WRITE_EVERY_S = 0.2
_FIRST_AFTER_S = 1.0  # so that a start does not wait for it
_CLOSE_S = 5.0
_PIECE_BYTES = 1 << 20
_RECORDS_AT_ONCE = 64  # about a millisecond

RecordMaker = Callable[[], bytes]
"""Holds nothing that changes: it is called later, in another thread."""


@dataclass(frozen=True, slots=True)
class FileBounds:
    """How much there may be of a folder's recordings, in bytes and files, and of what is not written yet."""

    max_file_bytes: int = 64 << 20
    max_bytes: int = 512 << 20
    max_files: int = 32
    max_waiting_bytes: int = 32 << 20


@dataclass(slots=True)
class _File:
    path: Path
    head: RecordMaker
    records: list[RecordMaker] = field(default_factory=list)  # that wait
    num_bytes: int = 0  # of those written


class FileWriter:
    """One recording's files, one after another. Older ones of the folder go as bounds ask for it, the oldest first.

    `ended` is called in the thread when nothing more is written: with the failure or None, and the records lost.
    """

    def __init__(self, folder: Path, bounds: FileBounds, ended: Callable[[str | None, int], None]) -> None:
        self.failure: str | None = None  # a sentence; nothing more is written then
        self._num_lost = self._num_taken = 0  # records; taken are those that are being written
        self._ended = ended
        self._folder = folder
        self._bounds = bounds
        self._files: deque[_File] = deque()  # the last one is open
        self._num_waiting_bytes = 0
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)
        self._thread.start()

    @property
    def num_file_bytes(self) -> int:
        """Of the newest file, what is written behind its head."""
        return self._files[-1].num_bytes

    def begin(self, path: Path, head: RecordMaker) -> None:
        with self._lock:
            self._files.append(_File(path, head))

    def write(self, record: RecordMaker, num_bytes: int) -> None:
        """Take a record that holds about so many bytes, unless it has failed, or fails now because too many wait."""
        with self._lock:
            if self.failure is None and self._num_waiting_bytes + num_bytes > self._bounds.max_waiting_bytes:
                self.failure = f"the disk is too slow: {self._num_waiting_bytes >> 20} MiB wait to be written"
            if self.failure is not None:
                self._num_lost += 1
                return
            self._files[-1].records.append(record)
            self._num_waiting_bytes += num_bytes

    def end(self) -> None:
        """Write what is left, and no more; does not wait for it."""
        self._closing.set()

    def join(self) -> None:
        """Wait until it is written, a few seconds at most."""
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        try:
            self._write_until_end()
        except OSError as error:
            self._fail(f"cannot write: {error.strerror or error}")
        except Exception as error:  # a value that has no form, which is no reason to stop serving
            self._fail(f"cannot make a record: {type(error).__name__} {error}")
        with self._lock:
            num_waiting = sum(len(file.records) for file in self._files)
        self._ended(self.failure, self._num_lost + num_waiting)

    def _fail(self, sentence: str) -> None:
        with self._lock:
            self.failure = sentence
            self._num_lost += self._num_taken

    def _write_until_end(self) -> None:
        number: int | None = None
        written: _File | None = None
        is_last, wait_s = False, _FIRST_AFTER_S
        try:
            while not is_last and self.failure is None:
                is_last, wait_s = self._closing.wait(wait_s), _WRITE_EVERY_S
                for file, records in self._take():
                    if file is not written:
                        if number is not None:
                            os.close(number)
                        number = None
                        self._make_room()
                        written, number = file, os.open(file.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                        _write_all(number, file.head())
                        file.head = bytes  # it may be large
                    assert number is not None, "it was opened with its file"
                    self._write_records(number, file, records)
        finally:
            if number is not None:
                os.close(number)

    def _write_records(self, number: int, file: _File, records: list[RecordMaker]) -> None:
        data, num_made = bytearray(), 0
        for record in records:
            data += record()
            num_made += 1
            if num_made % _RECORDS_AT_ONCE == 0:
                time.sleep(0)  # lets the event loop go on, which else would wait for Python's switch interval
            if len(data) >= _PIECE_BYTES:
                self._write(number, file, data, num_made)
                data, num_made = bytearray(), 0
        self._write(number, file, data, num_made)

    def _write(self, number: int, file: _File, data: bytearray, num_records: int) -> None:
        _write_all(number, data)
        file.num_bytes += len(data)
        self._num_taken -= num_records

    def _take(self) -> list[tuple[_File, list[RecordMaker]]]:
        with self._lock:
            taken = [(file, file.records) for file in self._files]
            for file, records in taken:
                file.records = []
                self._num_taken += len(records)
            while len(self._files) > 1:
                self._files.popleft()
            self._num_waiting_bytes = 0
        return taken

    def _make_room(self) -> None:
        found = []
        for path in self._folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):  # somebody else removes files too
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
        found.sort(reverse=True)
        most = self._bounds.max_bytes - self._bounds.max_file_bytes
        while found and (len(found) >= self._bounds.max_files or sum(size for _, size, _ in found) > most):
            _, _, oldest = found.pop()
            oldest.unlink(missing_ok=True)


def _write_all(file: int, data: bytes | bytearray) -> None:
    with memoryview(data) as rest:
        written = 0
        while written < len(rest):
            written += os.write(file, rest[written:])

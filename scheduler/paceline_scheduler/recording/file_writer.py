"""Writes the files of a recording in a thread of its own: a slow or full disk never keeps the event loop waiting.

Knows bytes and files, and bounds for both. Refuses to know what the bytes say.
"""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SUFFIX = ".recording"
_WRITE_EVERY_S = 0.2
_CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class FileBounds:
    """How much there may be of a folder's recordings, in bytes and files, and of what is not written yet."""

    max_file_bytes: int = 64 << 20
    max_bytes: int = 512 << 20
    max_files: int = 32
    max_waiting_bytes: int = 32 << 20


@dataclass(slots=True)
class _Part:
    path: Path
    data: bytearray


class FileWriter:
    """One recording's files, one after another. Older ones of the folder go as bounds ask for it, the oldest first.

    `ended` is called in the thread when nothing more is written: with the failure or None, and the bytes lost.
    """

    def __init__(self, folder: Path, bounds: FileBounds, ended: Callable[[str | None, int], None]) -> None:
        self.failure: str | None = None  # a sentence; nothing more is written then
        self._num_lost = 0
        self._ended = ended
        self._folder = folder
        self._bounds = bounds
        self._waiting: deque[_Part] = deque()
        self._num_waiting = 0
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)
        self._thread.start()

    def begin(self, path: Path) -> None:
        """Let what follows go into a new file."""
        with self._lock:
            self._waiting.append(_Part(path, bytearray()))

    def write(self, data: bytes) -> None:
        """Take bytes, unless it has failed, or fails now because too many wait."""
        with self._lock:
            if self.failure is None and self._num_waiting + len(data) > self._bounds.max_waiting_bytes:
                self.failure = f"the disk is too slow: {self._num_waiting >> 20} MiB wait to be written"
            if self.failure is not None:
                self._num_lost += len(data)
                return
            self._waiting[-1].data += data
            self._num_waiting += len(data)

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
            with self._lock:
                self.failure = f"cannot write: {error.strerror or error}"
                self._num_lost += self._num_waiting
        self._ended(self.failure, self._num_lost)

    def _write_until_end(self) -> None:
        file: int | None = None
        path: Path | None = None
        is_last = False
        try:
            while not is_last and self.failure is None:
                is_last = self._closing.wait(_WRITE_EVERY_S)
                for part in self._take():
                    if part.path != path:
                        if file is not None:
                            os.close(file)
                        file = None
                        self._make_room()
                        path, file = part.path, os.open(part.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                    assert file is not None, "it was opened with its path"
                    _write_all(file, part.data)
        finally:
            if file is not None:
                os.close(file)

    def _take(self) -> list[_Part]:
        with self._lock:
            taken = list(self._waiting)
            self._waiting.clear()
            if taken:
                self._waiting.append(_Part(taken[-1].path, bytearray()))
            self._num_waiting = 0
        return taken

    def _make_room(self) -> None:
        """Remove the oldest files, so that one more keeps the bounds."""
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


def _write_all(file: int, data: bytearray) -> None:
    with memoryview(data) as rest:
        written = 0
        while written < len(rest):
            written += os.write(file, rest[written:])

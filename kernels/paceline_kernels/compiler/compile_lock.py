"""Lets one process of a machine compile what several need, while the others wait to find it on disk.

Knows a file, a byte of which stands for each thing to compile, and how long one waits for a byte. It refuses to know
compilers, and what they leave on disk.

The locks are POSIX's (`fcntl`). They end with their process, however that ends. A process that holds one may take it
again, so a compiler may be called from within a compiler, as long as nothing is needed to compile itself: then nobody
waits in a circle. Closing the file would end all of its locks, so it stays open. Where files cannot be locked
everybody compiles, as if there were no others.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import time
from pathlib import Path

# Longer than the slowest compilation. Whoever holds a lock for longer does not compile, but was stopped.
_PATIENCE_S = 300.0
_POLL_S = 0.05

_log = logging.getLogger(__name__)


class CompileLock:
    """Locks that one process of a machine holds at a time, each a name in a file."""

    def __init__(self, patience_s: float = _PATIENCE_S) -> None:
        """patience_s: after waiting that long once, this process takes no lock any more."""
        self._patience_s = patience_s
        self._files: dict[Path, int] = {}
        self._held: set[tuple[Path, str]] = set()
        self._is_patient = True

    def take(self, file: Path, name: str) -> bool:
        """Wait until no other process holds the lock `name` in `file`. Returns whether this one holds it now."""
        with contextlib.suppress(OSError):
            if self._is_patient and self._wait(file, name):
                self._held.add((file, name))
                return True
        return False

    def release(self, file: Path, name: str) -> None:
        """Let others take the lock, if this process holds it."""
        if (file, name) in self._held:
            self._held.remove((file, name))
            with contextlib.suppress(OSError):
                fcntl.lockf(self._files[file], fcntl.LOCK_UN, 1, _byte(name))

    def _wait(self, file: Path, name: str) -> bool:
        if file not in self._files:
            self._files[file] = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        begin, is_told = time.monotonic(), False
        while True:
            try:
                fcntl.lockf(self._files[file], fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _byte(name))
                return True
            except BlockingIOError:
                if time.monotonic() - begin > self._patience_s:
                    self._is_patient = False
                    return False
            if not is_told:
                _log.info("another process compiles %s: waiting for it", name)
                is_told = True
            time.sleep(_POLL_S)


def _byte(name: str) -> int:
    """Which byte stands for the name; files need not be that long."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")

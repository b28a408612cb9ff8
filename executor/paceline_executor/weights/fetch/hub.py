"""Fetches a model of the Hugging Face hub into the cache, or finds it there.

The cache has `<cache>/hub/<org>--<name>/<commit>/<file>`, beside them `<commit>.json`, what the hub said of that
commit's files, and `refs/<revision>`, the commit that a branch or tag led to. A file gets its final name only after its
digest was checked; `<file>.partial` is continued. Refuses to know HTTP, which files make up a model, and what is in
them.
"""

import hashlib
import json
import os
import re
import tempfile
from dataclasses import asdict
from pathlib import Path
from urllib.parse import quote

import structlog

from paceline_executor.errors import HubUnreachableError, ModelFetchError
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
from paceline_executor.weights.fetch.hub_id import HubId

_COMMIT = re.compile(r"[0-9a-f]{40}")
_CHUNK_BYTES = 1 << 20


def fetch_from_hub(hub_id: HubId, *, cache_dir: Path, on_progress: OnProgress, options: FetchOptions) -> Path:
    """The model is complete and checked; its path contains the commit.

    Without a network the commit that the revision led to last time is used, where it is complete. Raises
    ModelNotFoundError, UnsupportedModelError for a repository without weights that are read, ModelFetchError.
    """
    root = cache_dir / "hub" / hub_id.repository.replace("/", "--")
    try:
        listing = _find_listing(hub_id, _Records(root), options)
        fetch = _CommitFetch(hub_id, listing, root / listing.commit, on_progress, options)
        fetch.complete(first_files(hub_id, listing.files))
        names = all_files(hub_id, listing.files, fetch.folder, has_tokenizer=options.has_tokenizer)
        fetch.complete(names)
    except OSError as error:
        raise storage_error(error, str(hub_id), root) from error
    return fetch.folder / names[0] if len(names) == 1 else fetch.folder


def _find_listing(hub_id: HubId, records: "_Records", options: FetchOptions) -> HubListing:
    """A commit never changes, so one that was listed is not asked for."""
    revision = options.revision or "main"
    recorded = records.listing(revision)
    if recorded is not None and (options.offline or recorded.commit == revision):
        return recorded
    if options.offline:
        raise offline_error(f"revision {revision} of {hub_id}", records.root)
    try:
        listing = HubClient(hub_id.repository, options.endpoint).list_files(options.revision)
    except HubUnreachableError as error:
        if recorded is None:
            raise
        structlog.get_logger().warning("hub_unreachable", reason=str(error), uses=recorded.commit)
        return recorded
    if _COMMIT.fullmatch(listing.commit) is None:
        raise ModelFetchError(f"the hub names no commit for revision {revision} of {hub_id}: check HF_ENDPOINT")
    if listing != recorded:  # else a cache that cannot be written to serves as well
        records.keep(revision, listing)
    return listing


class _Records:
    """What cannot be read counts as never said."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def listing(self, revision: str) -> HubListing | None:
        commit = revision if _COMMIT.fullmatch(revision) else self._read(self._ref_path(revision))
        if commit is None or _COMMIT.fullmatch(commit) is None:
            return None
        text = self._read(self._listing_path(commit))
        try:
            files = json.loads(text or "null")
            return HubListing(commit, {name: HubFile(**file) for name, file in files.items()})
        except (AttributeError, TypeError, ValueError, RecursionError):
            return None

    def keep(self, revision: str, listing: HubListing) -> None:
        files = {name: asdict(file) for name, file in listing.files.items()}
        self._write(self._listing_path(listing.commit), json.dumps(files))
        self._write(self._ref_path(revision), listing.commit)

    def _ref_path(self, revision: str) -> Path:
        return self.root / "refs" / quote(revision, safe="")

    def _listing_path(self, commit: str) -> Path:
        return self.root / f"{commit}.json"

    def _read(self, path: Path) -> str | None:
        return path.read_text("utf-8", errors="replace") if path.is_file() else None

    def _write(self, path: Path, text: str) -> None:
        """Whole or not at all: other processes read it without a lock."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
            file.write(text)
        Path(file.name).replace(path)


class _CommitFetch:
    def __init__(
        self, hub_id: HubId, listing: HubListing, folder: Path, on_progress: OnProgress, options: FetchOptions
    ) -> None:
        self.folder = folder
        self._hub_id = hub_id
        self._listing = listing
        self._on_progress = on_progress
        self._options = options
        self._client = HubClient(hub_id.repository, options.endpoint)

    def complete(self, names: list[str]) -> None:
        missing = self._missing(names)
        if missing and self._options.offline:
            raise offline_error(f"{missing[0]} of {self._hub_id}", self.folder)
        if not missing:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder, lambda: self._report(FetchPhase.WAITING, 0, self._size(missing))):
            self._fetch(self._missing(names))

    def _missing(self, names: list[str]) -> list[str]:
        return [name for name in names if not (self.folder / name).is_file()]

    def _size(self, names: list[str]) -> int:
        return sum(self._listing.files[name].size for name in names)

    def _fetch(self, names: list[str]) -> None:
        partial = {name: self.folder / f"{name}.partial" for name in names}
        there = sum(path.stat().st_size for path in partial.values() if path.is_file())
        check_space(self.folder, self._size(names) - there, str(self._hub_id))
        total, done = self._size(names), 0
        for name in names:
            file = self._listing.files[name]

            def on_bytes(count: int, before: int = done) -> None:
                self._report(FetchPhase.DOWNLOADING, before + count, total)

            self._client.download(name, file, self._listing.commit, partial[name], on_bytes)
            self._check(partial[name], file)
            partial[name].replace(self.folder / name)
            done += file.size

    def _check(self, path: Path, file: HubFile) -> None:
        kind, _, expected = file.digest.partition(":")
        digest = hashlib.sha256() if kind == "sha256" else hashlib.sha1(usedforsecurity=False)
        if kind != "sha256":
            digest.update(f"blob {file.size}\0".encode())  # as git hashes a file
        num_bytes = 0
        with path.open("rb") as source:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                num_bytes += len(chunk)
                if file.size > _CHUNK_BYTES:  # else it is done at once
                    self._report(FetchPhase.VERIFYING, num_bytes, file.size)
            os.fsync(source.fileno())  # after a power cut the name alone must still tell
        if digest.hexdigest() != expected:
            path.unlink()
            raise ModelFetchError(
                f"{path.stem} of {self._hub_id} has digest {digest.hexdigest()} where {expected} was published: "
                "start again, which downloads it anew"
            )

    def _report(self, phase: FetchPhase, num_bytes: int, total_bytes: int) -> None:
        self._on_progress(FetchProgress(phase, min(num_bytes, total_bytes), total_bytes))

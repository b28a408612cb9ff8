"""What every way of fetching a model shares: progress, one fetch at a time, digests, and what to say of a full disk.

Refuses to know where models come from.
"""

import contextlib
import errno
import fcntl
import hashlib
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from paceline_executor.errors import ModelFetchError
from paceline_executor.weights.fetch.pip_download import MAX_DOWNLOAD_S, POLL_S


class FetchPhase(Enum):
    WAITING = "waiting for another process to fetch"
    DOWNLOADING = "downloading"
    VERIFYING = "verifying"


@dataclass(frozen=True, slots=True)
class FetchProgress:
    """Counts bytes; while waiting neither number moves."""

    phase: FetchPhase
    num_bytes: int
    total_bytes: int


OnProgress = Callable[[FetchProgress], None]


@dataclass(frozen=True, slots=True)
class FetchOptions:
    revision: str | None = None  # of a Hugging Face model; None is "main"
    endpoint: str | None = None  # None is the Hugging Face hub itself
    offline: bool = False  # use only what is in the cache
    has_tokenizer: bool = True  # a folder is no model without one


@contextlib.contextmanager
def locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """path: of a file, which is left. The kernel lets go when a process dies, so no stale lock is.

    on_wait is called several times a second while another process holds it. Raises ModelFetchError after an hour.
    """
    with path.open("ab") as file:
        for _ in range(int(MAX_DOWNLOAD_S / POLL_S)):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                time.sleep(POLL_S)
            else:
                yield
                return
    raise ModelFetchError(f"another process has held {path} for too long: end it and try again")


def sha256_of(path: Path) -> str:
    """Returns it in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_space(folder: Path, needed: int, what: str, variable: str) -> None:
    """variable: which names the folder. Raises ModelFetchError where its disk has not `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelFetchError(
            f"{folder} has room for {free >> 20} MiB and {needed >> 20} MiB are needed to fetch {what}: "
            f"make room, or set {variable} to a folder on another disk"
        )


def offline_error(what: str, folder: Path) -> ModelFetchError:
    todo = "start once without it (paceline up: without --offline)"
    return ModelFetchError(f"{folder} does not have {what}, and HF_HUB_OFFLINE forbids to fetch it: {todo}")


def storage_error(error: OSError, what: str, folder: Path, variable: str) -> ModelFetchError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        todo = f"make room, or set {variable} to a folder on another disk"
    else:
        todo = f"set {variable} to a folder that can be written to"
    return ModelFetchError(f"cannot store {what} in {folder} ({error.strerror or error}): {todo}")

"""Asks the Hugging Face hub what a model's files are, and downloads one of them.

The only module that knows huggingface_hub; it turns each error into one sentence that says what to do. The library
brings the user's token (HF_TOKEN, or what `hf auth login` stored), proxy and certificates along.
"""

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers, disable_progress_bars

from paceline_executor.errors import HubUnreachableError, ModelError, ModelFetchError, ModelNotFoundError
from paceline_executor.weights.fetch.hub_id import COMMIT
from paceline_executor.weights.refusals import shown

# Nobody is told what is installed here; a cut connection loses a mebibyte at most; bars would break into the log.
constants.HF_HUB_DISABLE_TELEMETRY = True
constants.DOWNLOAD_CHUNK_SIZE = 1 << 20
disable_progress_bars()

_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_LIBRARY = "paceline"
_TIMEOUT_S = 20
_MAX_RESETS = 5  # in a row, each without a byte received
_LOGIN = "set HF_TOKEN or run 'hf auth login'"
_LATER = "check the network and start again, which goes on where this stopped"


@dataclass(frozen=True, slots=True)
class HubFile:
    """It belongs to one commit. Raises ValueError for what is neither: both are another's word."""

    size: int  # bytes
    digest: str  # in hex: SHA-256, or what git itself stores a file by: SHA-1 over a header and the contents

    def __post_init__(self) -> None:
        if type(self.size) is not int or self.size < 0 or not _DIGEST.fullmatch(self.digest):
            raise ValueError("a file without size or digest")


@dataclass(frozen=True, slots=True)
class HubListing:
    """Files by name; names are the hub's word and not yet checked. Raises ValueError for what is no commit."""

    commit: str
    files: dict[str, HubFile]

    def __post_init__(self) -> None:
        if not COMMIT.fullmatch(self.commit):
            raise ValueError("no commit")


class HubClient:
    def __init__(self, repository: str, endpoint: str | None) -> None:
        self._repository = repository
        self._endpoint = endpoint

    def list_files(self, revision: str | None) -> HubListing:
        """At `revision`, a branch, tag or commit; None is the default branch.

        Raises HubUnreachableError where no answer comes, ModelNotFoundError or ModelFetchError for what it says.
        """
        api = HfApi(endpoint=self._endpoint, library_name=_LIBRARY)
        try:
            with self._refusals(revision):
                info = api.model_info(self._repository, revision=revision, files_metadata=True, timeout=_TIMEOUT_S)
            files = {}
            for sibling in info.siblings or ():
                digest = sibling.blob_id if sibling.lfs is None else sibling.lfs.sha256
                files[str(sibling.rfilename)] = HubFile(sibling.size or 0, str(digest))
            return HubListing(str(info.sha), files)
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise self._unusable(error) from error

    def download(self, name: str, file: HubFile, commit: str, partial: Path, on_bytes: Callable[[int], None]) -> None:
        """Goes on where an earlier call stopped.

        on_bytes is called with what `partial` holds as it grows; what is there stays there when this raises. Raises as
        `list_files` does, and OSError for what cannot be written.
        """
        if file.size > constants.MAX_HTTP_DOWNLOAD_SIZE:
            raise ModelFetchError(
                f"{name} of {self._repository} is too large to be downloaded over HTTP: fetch it with 'hf download' "
                "and give the path"
            )
        url = hf_hub_url(self._repository, name, revision=commit, endpoint=self._endpoint)
        headers = build_hf_headers(library_name=_LIBRARY) | {"Accept-Encoding": "identity"}
        with self._refusals(commit), _CountedFile(partial, file.size, on_bytes) as target:
            num_resets = 0
            while num_resets < _MAX_RESETS:
                before = target.tell()
                try:
                    http_get(url, target, resume_size=before, headers=headers, expected_size=file.size)
                    return
                except (httpx2.ReadError, httpx2.WriteError):  # the library goes on after every other cut
                    num_resets = 0 if target.tell() > before else num_resets + 1
            raise HubUnreachableError(
                f"{name} of {self._repository}: the connection is reset again and again: {_LATER}"
            )

    @contextmanager
    def _refusals(self, revision: str | None) -> Iterator[None]:
        """Errors of the disk pass."""
        try:
            yield
        except HfHubHTTPError as error:
            raise self._refusal(error, revision) from error
        except (httpx2.HTTPError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise self._unusable(error) from error

    def _refusal(self, error: HfHubHTTPError, revision: str | None) -> ModelError:
        name, status = self._repository, error.response.status_code
        if isinstance(error, RevisionNotFoundError):
            return ModelNotFoundError(f"{name} has no revision {shown(revision or 'main')}: check --revision")
        if isinstance(error, GatedRepoError):
            return ModelFetchError(
                f"{name} is gated: accept its terms at https://huggingface.co/{name}, then {_LOGIN} for that account"
            )
        if isinstance(error, RepositoryNotFoundError):
            return ModelNotFoundError(
                f"the Hugging Face hub has no model {name} that you may read: check the spelling; if it is private, "
                f"{_LOGIN}"
            )
        if status in (401, 403):
            return ModelFetchError(
                f"the Hugging Face hub refuses access to {name} ({status}): {_LOGIN} with a valid token"
            )
        if status == 404:
            return ModelNotFoundError(f"the Hugging Face hub lacks a file of {name}: {shown(str(error))}")
        return HubUnreachableError(f"the Hugging Face hub answers {status} for {name}: {_LATER}")

    def _unusable(self, error: Exception) -> HubUnreachableError:
        reason = shown(str(error) or type(error).__name__)
        return HubUnreachableError(
            f"{self._endpoint or constants.ENDPOINT} gave no usable answer ({reason}): check the spelling; {_LATER}"
        )


class _CountedFile(io.BufferedWriter):
    """Says how long it is."""

    def __init__(self, path: Path, size: int, on_bytes: Callable[[int], None]) -> None:
        super().__init__(io.FileIO(path, "ab"))
        self._on_bytes = on_bytes
        if self.tell() > size:  # of another file; contents are checked later
            self.seek(self.truncate(0))

    def write(self, data: bytes) -> int:  # type: ignore[override]  # what is written is the library's, and is bytes
        count = super().write(data)
        self._on_bytes(self.tell())
        return count

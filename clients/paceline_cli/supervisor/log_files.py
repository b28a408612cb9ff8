"""Keeps what the children print, one file each. A disk that is full or read-only costs lines, never the service.

Apart from the supervisor, which no disk can stop.
"""

import errno
from collections.abc import Callable
from pathlib import Path

from paceline_cli.supervisor.events import ChildEvent, Printed

MAX_FILE_BYTES = 64 * 1024 * 1024


class LogFiles:
    """Appends to `FOLDER/NAME.log`; a file at its limit becomes `NAME.log.1`, in place of the one before."""

    def __init__(self, folder: Path, *, warn: Callable[[str], None], max_file_bytes: int = MAX_FILE_BYTES) -> None:
        self._folder = folder
        self._warn = warn
        self._max_file_bytes = max_file_bytes
        self._has_warned = False

    def on_event(self, event: ChildEvent) -> None:
        if not isinstance(event, Printed):
            return
        try:
            self._append(self._folder / f"{event.name}.log", event.line + b"\n")
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                self._warn(f"cannot write logs in {self._folder}: {error.strerror}; going on without")

    def _append(self, path: Path, data: bytes) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # a FIFO would keep everything waiting
            raise OSError(errno.EINVAL, f"{path.name} is not a regular file")
        with path.open("ab") as file:
            is_full = file.tell() + len(data) > self._max_file_bytes
            if not is_full:
                file.write(data)
        if is_full:
            path.replace(path.with_name(path.name + ".1"))
            path.write_bytes(data)

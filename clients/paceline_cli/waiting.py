"""Says on stderr what a command waits for, once it has waited for a second: silence would look like a fault."""

import contextlib
import sys
import threading
import time
from typing import Self

import typer

from paceline_client.errors import PacelineError
from paceline_client.sync_client import Client, Stream

_SILENT_SECONDS = 1.25  # a little more than it takes to find out that nobody is there
_POLL_SECONDS = 0.1
_ASK_SECONDS = 1.0


class WaitingNotice:
    """Inside the block, says once in each silence what keeps a client from a server, or its request from an executor;
    nothing where nothing does.
    """

    def __init__(self, client: Client, stream: Stream | None = None) -> None:
        self._client = client
        self._stream = stream
        self._heard_at = time.monotonic()
        self._has_heard = False
        self._is_over = threading.Event()
        self._watch = threading.Thread(target=self._watch_client, name="paceline-waiting", daemon=True)

    def heard(self) -> None:
        """Something has come."""
        self._heard_at, self._has_heard = time.monotonic(), True

    def __enter__(self) -> Self:
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._watch.join(_POLL_SECONDS)  # it may be asking

    def _watch_client(self) -> None:
        told_of = None  # the silence that began then
        pause = _SILENT_SECONDS
        while not self._is_over.wait(pause):
            pause, heard_at = _POLL_SECONDS, self._heard_at
            if told_of == heard_at or time.monotonic() - heard_at < _SILENT_SECONDS:
                continue
            trouble = self._client.trouble or self._blocker()
            if self._is_over.is_set() or heard_at != self._heard_at:
                continue
            if trouble:
                told_of = heard_at
                typer.echo(f"{self._line_end()}waiting: {trouble}", err=True)
            else:
                pause = _ASK_SECONDS

    def _blocker(self) -> str:
        if self._stream is not None:
            with contextlib.suppress(PacelineError):
                return self._client.explain(self._stream.request_id).waiting_for
        return ""

    def _line_end(self) -> str:
        """Of the text that stands on the same terminal."""
        return "\n" if self._has_heard and sys.stdout.isatty() and sys.stderr.isatty() else ""

"""Says on stderr what a command waits for, once it has waited for a second: silence would look like a fault."""

import threading
from typing import Self

import typer

from paceline_client.sync_client import Client

_SILENT_SECONDS = 1.25  # a little more than it takes to find out that nobody is there
_POLL_SECONDS = 0.1


class WaitingNotice:
    """Inside the block, or until `over`, says once what keeps a client from a server; nothing where nothing does."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._is_over = threading.Event()
        self._watch = threading.Thread(target=self._watch_client, name="paceline-waiting", daemon=True)

    def over(self) -> None:
        """What was waited for has come."""
        self._is_over.set()

    def __enter__(self) -> Self:
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over()
        self._watch.join()

    def _watch_client(self) -> None:
        pause = _SILENT_SECONDS
        while not self._is_over.wait(pause):
            pause = _POLL_SECONDS
            if trouble := self._client.trouble:
                typer.echo(f"waiting: {trouble}", err=True)
                return

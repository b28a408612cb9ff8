"""The client the commands use: a server that is not there is an error soon, because a person waits.

Apart, because every command that asks a server takes it.
"""

from pathlib import Path

from paceline_cli.config import token_of
from paceline_cli.options import retry_of, timeout_of, tls_of
from paceline_client.sync_client import Client


def cli_client(
    target: str, tls_dir: Path | None, token_file: Path | None, max_outage_seconds: float | None = None
) -> Client:
    """A client of the target, not connected yet. `InvalidRequestError` for files that cannot be read."""
    return Client(
        target,
        tls=tls_of(tls_dir),
        token=token_of(token_file),
        timeout=timeout_of(None),
        retry=retry_of(max_outage_seconds),
    )

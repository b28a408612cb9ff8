"""The client the commands use: a server that is not there is an error soon, because a person waits.

Apart, because every command that asks a server takes it.
"""

from paceline_cli.options import timeout_of
from paceline_client.sync_client import Client


def cli_client(target: str) -> Client:
    """A client of the target, not connected yet."""
    return Client(target, timeout=timeout_of(None))

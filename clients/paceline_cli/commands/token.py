"""`paceline token`: a token for a caller, and its hash for the scheduler."""

import errno
import hashlib
import json
import os
import secrets
import stat
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from paceline_cli.failures import reported
from paceline_client.requests import invalid

_NUM_RANDOM_BYTES = 32
_MAX_NAME_BYTES = 128  # as the scheduler has it


class TokenRole(StrEnum):
    CLIENT = "client"
    OPERATOR = "operator"


def token(
    tokens: Annotated[
        Path, typer.Option("--tokens", metavar="FILE", help="The scheduler's file of hashes; a line is added to it.")
    ],
    tenant: Annotated[
        str | None, typer.Option("--tenant", metavar="NAME", help="Whose requests it is for; clients have one.")
    ] = None,
    role: Annotated[
        TokenRole, typer.Option("--role", help="client: requests of the tenant; operator: the admin port.")
    ] = TokenRole.CLIENT,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="What the scheduler's log calls its owner.")
    ] = None,
) -> None:
    """Make a token for a tenant or an operator.

    It is printed once, and its hash added to the scheduler's file. A running scheduler reads the file again within a
    second. To revoke a token delete its line.
    """
    with reported():
        if tenant is None and role is TokenRole.CLIENT:
            raise invalid("tenant", "is missing: a client's token is of a tenant")
        for option, text in (("tenant", tenant), ("name", name)):
            if text is not None and not 1 <= len(text.encode(errors="replace")) <= _MAX_NAME_BYTES:
                raise invalid(option, f"has to have 1 to {_MAX_NAME_BYTES} bytes")
        secret = secrets.token_hex(_NUM_RANDOM_BYTES)
        digest = hashlib.sha256(secret.encode()).hexdigest()
        fields = {"hash": f"sha256:{digest}", "name": name, "tenant": tenant, "role": role.value}
        try:
            _add_line(tokens, json.dumps({key: value for key, value in fields.items() if value is not None}))
        except OSError as error:
            raise invalid("tokens", f"cannot write {tokens}: {error.strerror}") from None
        typer.echo(secret)


def _add_line(path: Path, line: str) -> None:
    """Add a line at once, so that a scheduler reads all of it or nothing; others do not see a new file."""
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        size = os.fstat(file).st_size
        ends_line = size == 0 or os.pread(file, 1, size - 1) == b"\n"
        os.write(file, f"{'' if ends_line else chr(10)}{line}\n".encode())
    finally:
        os.close(file)

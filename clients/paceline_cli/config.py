"""What the command line takes from the environment, and nothing else does."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from paceline_client.async_client import DEFAULT_TARGET

TargetOption = Annotated[
    str,
    typer.Option(
        "--target",
        envvar="PACELINE_TARGET",
        metavar="HOST:PORT,…",
        help="The scheduler to talk to, or several that stand by for each other; dns:///NAME:PORT: all of a name.",
    ),
]
AdminTargetOption = Annotated[
    str | None,
    typer.Option("--admin-target", metavar="HOST:PORT,…", help="The admin ports; unset, those after --target."),
]

__all__ = [
    "DEFAULT_TARGET",
    "AdminTargetOption",
    "TargetOption",
    "openai_api_key",
    "quieten_grpc",
    "token_of",
    "wants_traceback",
]


def token_of(file: Path | None) -> str | Path | None:
    """The token to show: the file that has it, else PACELINE_TOKEN, which other users of the machine cannot read as
    they could an option.
    """
    return file or os.environ.get("PACELINE_TOKEN") or None


def quieten_grpc() -> None:
    """Keep gRPC's own log lines out of the terminal, here and in the processes started from here."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def environment_with(variables: Iterable[tuple[str, str]]) -> dict[str, str]:
    """This process's, and these."""
    return {**os.environ, **dict(variables)}


def wants_traceback() -> bool:
    """Whether PACELINE_DEBUG asks for the traceback of an error that nobody foresaw."""
    return os.environ.get("PACELINE_DEBUG", "") not in ("", "0")


def openai_api_key() -> str | None:
    """The key for OpenAI-compatible endpoints: not an option, which other users of the machine could read."""
    return os.environ.get("OPENAI_API_KEY") or None

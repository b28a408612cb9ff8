"""What commands do to stdout as a whole. What they write there, they know themselves.

Apart, because all commands that print share it.
"""

import io
import json
import os
import sys

import typer


def accept_any_text() -> None:
    """From now on a character that stdout's encoding lacks is written as a question mark: better than no answer."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def echo_json(value: object) -> None:
    """One line of JSON, which loses nothing: escaped where stdout is not Unicode."""
    is_unicode = sys.stdout.encoding.lower().startswith("utf")
    typer.echo(json.dumps(value, ensure_ascii=not is_unicode))


def abandon_stdout() -> None:
    """Nothing more can be written there; the interpreter must not complain when it flushes at its end."""
    with open(os.devnull, "wb") as nowhere:  # noqa: PTH123
        os.dup2(nowhere.fileno(), sys.stdout.fileno())

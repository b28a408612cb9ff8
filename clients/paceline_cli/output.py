"""What commands do to stdout as a whole. What they write there, they know themselves.

Apart, because all commands that print share it.
"""

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from typing import TextIO

import typer

from paceline.process.line_writer import LineWriter

_LAST_LINES_S = 0.5


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


@contextlib.contextmanager
def never_waiting() -> Iterator[dict[str, LineWriter]]:
    """Inside the block nobody waits or fails who writes to stdout or stderr, whatever becomes of them.

    Yields who writes instead, and knows what was lost.
    """
    before, writers = {"stdout": sys.stdout, "stderr": sys.stderr}, dict[str, LineWriter]()
    for name, stream in before.items():
        with contextlib.suppress(io.UnsupportedOperation):  # of what is in memory, and takes everything
            writers[name] = LineWriter(stream.fileno(), _lost, encoding=stream.encoding)
            setattr(sys, name, _Unhurried(stream, writers[name]))
    try:
        yield writers
    finally:
        sys.stdout, sys.stderr = before.values()
        for writer in writers.values():
            writer.close(_LAST_LINES_S)


def _lost(num_lines: int) -> str:
    return f"({num_lines} lines of this were lost: nobody took them)\n"


class _Unhurried:
    """As much of a text stream as print, click and rich ask for."""

    def __init__(self, stream: TextIO, writer: LineWriter) -> None:
        self.encoding, self.isatty, self.fileno = stream.encoding, stream.isatty, stream.fileno
        self.flush, self._writer = writer.flush, writer

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError("it takes texts")
        return self._writer.write(text)

"""What stands between the marks of a call of a tool, read as it comes: the tool's name, then its arguments as JSON.

A reader is given text from a place on, and returns how far it has read and whether the call is over; what is not read
is given again with more behind it. Before it has said a name it may raise NoCallError: then all of it is text.
"""

import re
from enum import Enum
from typing import Protocol

from paceline_scheduler.api.text.parts.bound import BoundCall
from paceline_scheduler.api.text.parts.patterns import UNFINISHED

MAX_HELD_CHARS = 64 * 1024  # of a call whose name is not known yet, and of an argument
SPACES = " \t\n\r"
_ENDS_OF_SCALARS = ",}]" + SPACES
IN_TEXT = re.compile(r'["\\]')


class NoCallError(Exception):
    """It cannot be read as a call. What stands before `said_to` was said of calls before it; None: nothing was."""

    said_to: int | None = None


class CallOutput(Protocol):
    def begin_call(self, name: str) -> None: ...

    def add_arguments(self, piece: str) -> None: ...


class CallReader(Protocol):
    unsaid: "Unsaid"

    def passes(self, text: str) -> bool:
        """Whether it only adds to arguments; then it has."""
        ...

    def read(self, text: str, position: int, is_end: bool) -> tuple[int, bool]: ...


class Unsaid:
    """What was read of a call that may be none."""

    def __init__(self, opening: str) -> None:
        self._pieces, self._num_chars = [opening], len(opening)

    def add(self, piece: str) -> None:
        if self._num_chars + len(piece) > MAX_HELD_CHARS:
            raise NoCallError
        self._pieces.append(piece)
        self._num_chars += len(piece)

    def clear(self) -> None:
        self._pieces.clear()
        self._num_chars = 0

    def take(self) -> str:
        text = "".join(self._pieces)
        self.clear()
        return text


class ValueProgress(Enum):
    MORE = "more text decides"
    DONE = "the value is complete"
    CLOSED = "the call's closing mark stands where the value should go on"


class JsonValue:
    """Finds the end of a JSON value; what is malformed inside of it stays as it is."""

    __slots__ = ("_call", "_depth", "_is_escaped", "_is_in_text", "_is_scalar", "_pattern", "is_text")

    def __init__(self, first: str, call: BoundCall) -> None:
        self._call = call
        self._depth = 0
        self.is_text = first == '"'
        self._is_in_text = self._is_escaped = False
        self._is_scalar = first not in '"{['
        self._pattern = call.scalar_end if self._is_scalar else call.structure

    def passes(self, text: str) -> bool:
        """Whether it is all inside of a text of the value."""
        return self._is_in_text and not self._is_escaped and '"' not in text and "\\" not in text

    def read(self, text: str, position: int, is_end: bool) -> tuple[int, ValueProgress]:
        length, depth, is_in_text = len(text), self._depth, self._is_in_text
        progress = ValueProgress.MORE
        while position < length:
            if is_in_text:
                if self._is_escaped:
                    self._is_escaped, position = False, position + 1
                    continue
                found = IN_TEXT.search(text, position)
                if found is None:
                    position = length
                    break
                position = found.end()
                is_in_text = found[0] != '"'
                self._is_escaped = is_in_text
            else:
                found = self._pattern.search(text, position)
                if found is None:
                    position = length
                    break
                position, letter = found.start(), found[0]
                if letter == '"' and not self._is_scalar:
                    is_in_text, position = True, position + 1
                elif letter in "{[" and not self._is_scalar:
                    depth, position = depth + 1, position + 1
                elif letter in "}]" and depth:
                    depth, position = depth - 1, position + 1
                elif self._is_scalar and letter in _ENDS_OF_SCALARS:
                    progress = ValueProgress.DONE
                    break
                else:
                    mark, _ = self._call.closes.match(text, position, is_end=is_end)
                    if mark is not None:
                        progress = ValueProgress.MORE if mark is UNFINISHED else ValueProgress.CLOSED
                        break
                    position += 1
                    continue
            if not (depth or is_in_text):
                progress = ValueProgress.DONE
                break
        self._depth, self._is_in_text = depth, is_in_text
        return position, progress


def behind_spaces(text: str, position: int) -> int:
    while position < len(text) and text[position] in SPACES:
        position += 1
    return position

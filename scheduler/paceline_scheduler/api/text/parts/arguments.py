"""Arguments of a call whose opening mark has the tool's name: as JSON, or between marks, of which JSON is made."""

import json
import re
from collections.abc import Mapping
from json.encoder import encode_basestring
from typing import Any

from paceline_scheduler.api.text.parts.bound import BoundCall
from paceline_scheduler.api.text.parts.json_schemas import json_of, properties_of, schema_types
from paceline_scheduler.api.text.parts.patterns import MAX_MARK_CHARS, UNFINISHED, Match
from paceline_scheduler.api.text.parts.reading import (
    IN_TEXT,
    MAX_HELD_CHARS,
    CallOutput,
    JsonValue,
    NoCallError,
    Unsaid,
    ValueProgress,
    behind_spaces,
)

_MAX_DEPTH = 256
_WORD = re.compile(r"[\w.+-]+")
_WORDS_OF_PYTHON = {"None": "null", "True": "true", "False": "false"}


class _ArgumentsReader:
    """The name is known; the call begins with its first brace."""

    def __init__(self, call: BoundCall, out: CallOutput, opening: str, name: str) -> None:
        self.unsaid = Unsaid(opening)
        self._call = call
        self._out = out
        self._name = name
        self._has_begun = False

    def _begin(self, text: str, position: int) -> int | None:
        """Returns the place of the brace, or None where there are only spaces."""
        start = position
        position = behind_spaces(text, position)
        if position == len(text):
            self.unsaid.add(text[start:])
            return None
        if text[position] != "{":
            raise NoCallError
        self._out.begin_call(self._name)
        self._has_begun = True
        self.unsaid.clear()
        return position


class Arguments(_ArgumentsReader):
    """Body.ARGUMENTS in plain JSON."""

    _value: JsonValue | None = None

    def passes(self, text: str) -> bool:
        if self._value is None or not self._value.passes(text):
            return False
        self._out.add_arguments(text)
        return True

    def read(self, text: str, position: int, is_end: bool) -> tuple[int, bool]:
        if self._value is None:
            begin = self._begin(text, position)
            if begin is None:
                return len(text), False
            position, self._value = begin, JsonValue("{", self._call)
        start = position
        position, progress = self._value.read(text, position, is_end)
        self._out.add_arguments(text[start:position])
        return position, progress is not ValueProgress.MORE


class LaxArguments(_ArgumentsReader):
    """Body.ARGUMENTS in JSON with bare keys and other quotation marks, which becomes plain JSON."""

    def __init__(self, call: BoundCall, out: CallOutput, opening: str, name: str) -> None:
        super().__init__(call, out, opening, name)
        self._quotes = (*call.quotes, ('"', '"'))
        self._open: list[str] = []  # braces and brackets
        self._is_key = False
        self._quote = ""  # what ends the text

    def passes(self, text: str) -> bool:
        if not self._quote or self._quote[0] in text or "\\" in text:
            return False
        self._out.add_arguments(_inside(text) if self._quote != '"' else text)
        return True

    def read(self, text: str, position: int, is_end: bool) -> tuple[int, bool]:
        if not self._has_begun:
            begin = self._begin(text, position)
            if begin is None:
                return len(text), False
            position = begin
        while position < len(text):
            end = (self._read_text if self._quote else self._read_structure)(text, position, is_end)
            if end is None:
                return position, False
            position = end
            if not self._open:
                return position, True
        return position, False

    def _read_text(self, text: str, position: int, is_end: bool) -> int | None:
        if self._quote == '"':
            found = IN_TEXT.search(text, position)
            end = len(text) if found is None else found.end() + (found[0] == "\\")
            if end > len(text) and not is_end:
                end = len(text) - 1  # with what is escaped
            self._out.add_arguments(text[position:end])
            if found is not None and found[0] == '"':
                self._quote, self._is_key = "", False
            return end if end > position else None
        end = text.find(self._quote, position)
        if end < 0:
            end = len(text) - (0 if is_end else _num_begun(text, position, self._quote))
            self._out.add_arguments(_inside(text[position:end]))
            return end if end > position else None
        self._out.add_arguments(_inside(text[position:end]) + '"')
        end += len(self._quote)
        self._quote, self._is_key = "", False
        return end

    def _read_structure(self, text: str, position: int, is_end: bool) -> int | None:
        found, _ = self._call.closes.match(text, position, is_end=is_end)
        if isinstance(found, Match):
            self._open.clear()
            return position
        for begin, end in self._quotes:
            if text.startswith(begin, position):
                self._out.add_arguments('"')
                self._quote = end
                return position + len(begin)
            if not is_end and begin.startswith(text[position:]):
                return None
        if found is UNFINISHED:
            return None
        letter, behind = text[position], position + 1
        if _WORD.match(letter):
            behind = _WORD.match(text, position).end()  # type: ignore[union-attr]
            if behind == len(text) and not is_end and behind - position < MAX_MARK_CHARS:
                return None
            word = text[position:behind]
            is_bare = self._is_key and self._call.form.has_bare_keys
            letter = json.dumps(word, ensure_ascii=False) if is_bare else _WORDS_OF_PYTHON.get(word, word)
            self._is_key = False
        elif letter in "{[":
            self._open.append(letter)
            self._is_key = letter == "{"
            if len(self._open) > _MAX_DEPTH:
                self._open.clear()
        elif letter in "}]":
            self._open.pop()
            self._is_key = False
        elif letter == ",":
            self._is_key = self._open[-1] == "{"
        self._out.add_arguments(letter)
        return behind


class PairedArguments(_ArgumentsReader):
    """Body.PAIRS: JSON is made of the values, with the types of the tool's schema. Text goes on as it comes; a value of
    another type does when it is complete.
    """

    def __init__(self, call: BoundCall, out: CallOutput, opening: str, name: str, schema: str) -> None:
        super().__init__(call, out, opening, name)
        self._schema = schema
        self._properties: Mapping[str, Any] = {}
        self._types: tuple[str, ...] | None = None  # of the value that is being read
        self._held: list[str] | None = None  # None: it is text
        self._num_held = 0

    def passes(self, text: str) -> bool:
        is_text = self._types is not None and self._held is None
        if not is_text or not self._call.pair_close.firsts.isdisjoint(text):
            return False
        self._out.add_arguments(_inside(text))
        return True

    def read(self, text: str, position: int, is_end: bool) -> tuple[int, bool]:
        while position < len(text):
            if self._types is not None:
                start, found, _ = self._call.pair_close.search(text, position, is_end=is_end)
                self._take(text[position:start])
                if found is None:
                    return start, False
                position = found.end
                self._end_value()
                continue
            start = position
            position = behind_spaces(text, position)
            tag, pattern = self._call.tags.match(text, position, is_end=is_end)
            if position == len(text) or tag is UNFINISHED:
                if not self._has_begun:
                    self.unsaid.add(text[start:position])
                return position, False
            if tag is None and not self._has_begun:
                raise NoCallError
            is_first = self._begin_once()
            if not isinstance(tag, Match) or pattern in self._call.closes.patterns:
                self._out.add_arguments("}")
                return position, True
            position = tag.end
            self._begin_value(tag.groups["key"], is_first)
        return position, False

    def _begin_once(self) -> bool:
        if self._has_begun:
            return False
        self._out.begin_call(self._name)
        self._out.add_arguments("{")
        self._has_begun = True
        self.unsaid.clear()
        self._properties = properties_of(self._schema)
        return True

    def _begin_value(self, key: str, is_first: bool) -> None:
        self._out.add_arguments(("" if is_first else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        self._types = schema_types(self._properties.get(key))
        self._held = [] if self._types and self._types != ("string",) else None
        self._num_held = 0
        if self._held is None:
            self._out.add_arguments('"')

    def _take(self, piece: str) -> None:
        if self._held is None:
            self._out.add_arguments(_inside(piece))
            return
        self._held.append(piece)
        self._num_held += len(piece)
        if self._num_held > MAX_HELD_CHARS:
            self._out.add_arguments('"' + _inside("".join(self._held)))
            self._held = None

    def _end_value(self) -> None:
        assert self._types is not None, "there is a value"
        self._out.add_arguments('"' if self._held is None else json_of("".join(self._held), self._types))
        self._types = self._held = None


def _inside(text: str) -> str:
    """As it stands inside of a JSON text."""
    return encode_basestring(text)[1:-1]


def _num_begun(text: str, position: int, mark: str) -> int:
    """How many characters at the end may begin the mark."""
    longest = min(len(mark) - 1, len(text) - position)
    return next((count for count in range(longest, 0, -1) if text.endswith(mark[:count])), 0)

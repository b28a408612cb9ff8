"""What stands between the marks of a call of a tool, read as it comes: the tool's name, then its arguments as JSON.

A reader is given text from a place on, and returns how far it has read and whether the call is over; what is not read
is given again with more behind it. Before it has said a name it may raise NoCallError: then all of it is text.
"""

import json
import re
from collections.abc import Mapping
from enum import Enum
from json.encoder import encode_basestring
from typing import Any, Protocol

from paceline_scheduler.api.text.parts.bound import BoundCall
from paceline_scheduler.api.text.parts.json_schemas import json_of, properties_of, schema_types
from paceline_scheduler.api.text.parts.patterns import MAX_MARK_CHARS, UNFINISHED, Match
from paceline_scheduler.api.text.parts.template import Body

MAX_HELD_CHARS = 64 * 1024  # of a call whose name is not known yet, and of an argument
_MAX_NAME_CHARS = 1024
_MAX_DEPTH = 256
_SPACES = " \t\n\r"
_ENDS_OF_SCALARS = ",}]" + _SPACES
_IN_TEXT = re.compile(r'["\\]')
_WORD = re.compile(r"[\w.+-]+")
_WORDS_OF_PYTHON = {"None": "null", "True": "true", "False": "false"}


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


class _Progress(Enum):
    MORE = "more text decides"
    DONE = "the value is complete"
    CLOSED = "the call's closing mark stands where the value should go on"


class _JsonValue:
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

    def read(self, text: str, position: int, is_end: bool) -> tuple[int, _Progress]:
        length, depth, is_in_text = len(text), self._depth, self._is_in_text
        progress = _Progress.MORE
        while position < length:
            if is_in_text:
                if self._is_escaped:
                    self._is_escaped, position = False, position + 1
                    continue
                found = _IN_TEXT.search(text, position)
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
                    progress = _Progress.DONE
                    break
                else:
                    mark, _ = self._call.closes.match(text, position, is_end=is_end)
                    if mark is not None:
                        progress = _Progress.MORE if mark is UNFINISHED else _Progress.CLOSED
                        break
                    position += 1
                    continue
            if not (depth or is_in_text):
                progress = _Progress.DONE
                break
        self._depth, self._is_in_text = depth, is_in_text
        return position, progress


class _Expects(Enum):
    LIST = "["
    OBJECT = "{"
    KEY = '"}'
    COLON = ":"
    VALUE = "a value"
    COMMA = ",}"
    NEXT = ",]"
    NOTHING = ""


class JsonCalls:
    """Body.CALL and CALLS. `names` are those of tools, where a call is known by its name alone."""

    def __init__(self, call: BoundCall, out: CallOutput, opening: str, names: frozenset[str] | None) -> None:
        self.unsaid = Unsaid(opening)
        self._call = call
        self._out = out
        self._names = names
        self._is_list = call.form.body is Body.CALLS
        self._expects = _Expects.LIST if self._is_list else _Expects.OBJECT
        self._value: _JsonValue | None = None
        self._key: str | None = None  # None: the value is a key
        self._collected = ""
        self._said_to = 0
        self._new_object(0)

    def _new_object(self, position: int) -> None:
        self._name = ""
        self._early: list[str] = []  # arguments before the name
        self._has_begun = self._is_streaming = False
        self._said_to = position

    def passes(self, text: str) -> bool:
        if not self._is_streaming or self._value is None or not self._value.passes(text):
            return False
        self._out.add_arguments(text)
        return True

    def read(self, text: str, position: int, is_end: bool) -> tuple[int, bool]:
        if self._is_streaming:
            assert self._value is not None, "arguments are a value"
            start = position
            position, progress = self._value.read(text, position, is_end)
            self._out.add_arguments(text[start:position])
            if progress is _Progress.MORE:
                return position, False
            self._end_value()
            if progress is _Progress.CLOSED:
                return position, True
        self._said_to = position
        try:
            position, is_over = self._read(text, position, is_end)
            if not self._has_begun:
                self.unsaid.add(text[self._said_to : position])
        except NoCallError as error:
            error.said_to = self._said_to
            raise
        return position, is_over

    def _read(self, text: str, position: int, is_end: bool) -> tuple[int, bool]:
        while position < len(text):
            if self._value is not None:
                start = position
                position, progress = self._value.read(text, position, is_end)
                self._collect(text[start:position])
                if progress is _Progress.MORE:
                    return position, False
                self._end_value()
                if progress is _Progress.CLOSED:
                    return position, self._give_up()
            elif (letter := text[position]) in _SPACES:
                position += 1
            elif self._takes(letter, position):
                position += self._value is None
                if self._expects is _Expects.NOTHING:
                    return position, True
            else:
                return position, self._give_up()
        return position, False

    def _give_up(self) -> bool:
        """What was said stays said."""
        if not self._has_begun:
            raise NoCallError
        return True

    def _takes(self, letter: str, position: int) -> bool:
        expects = self._expects
        if expects is _Expects.VALUE or (expects is _Expects.KEY and letter == '"'):
            if expects is _Expects.KEY:
                self._key = None
            self._begin_value(letter)
            return True
        if letter not in expects.value:
            return False
        if letter in "[{:,":
            if letter == "{" and self._has_begun:
                self._new_object(position)
            after = {"[": _Expects.OBJECT, "{": _Expects.KEY, ":": _Expects.VALUE}
            self._expects = after.get(letter, _Expects.OBJECT if expects is _Expects.NEXT else _Expects.KEY)
        elif letter == "}":
            self._end_object()
        else:
            self._expects = _Expects.NOTHING
        return True

    def _begin_value(self, letter: str) -> None:
        self._value = _JsonValue(letter, self._call)
        self._collected = ""
        if self._key != self._call.form.arguments:
            return
        if self._has_begun:
            self._key = ""  # said already
        elif self._name:
            self._begin()
            self._is_streaming = not self._value.is_text
        elif self._names is not None:
            raise NoCallError  # of an answer in JSON no more is held

    def _begin(self) -> None:
        if self._names is not None and self._name not in self._names:
            raise NoCallError
        self._out.begin_call(self._name)
        self._has_begun = True
        self.unsaid.clear()

    def _collect(self, piece: str) -> None:
        if self._is_streaming:
            self._out.add_arguments(piece)
            return
        if self._key == self._call.form.arguments:
            self._early.append(piece)
        elif self._key in (None, self._call.form.name):
            self._collected += piece
            if len(self._collected) > _MAX_NAME_CHARS:
                raise NoCallError

    def _end_value(self) -> None:
        value, key = self._value, self._key
        assert value is not None, "there is one"
        self._value, self._expects = None, _Expects.COMMA
        if self._is_streaming:
            self._is_streaming = False
        elif key == self._call.form.arguments:
            if value.is_text:  # as OpenAI writes them
                self._early = [_text_of("".join(self._early))]
            if self._has_begun:
                self._out.add_arguments("".join(self._early))
        elif key is None:
            self._key, self._expects = _text_of(self._collected), _Expects.COLON
        elif key == self._call.form.name and not self._has_begun:
            self._name = _text_of(self._collected)
            if self._early:
                self._begin()
                self._out.add_arguments("".join(self._early))

    def _end_object(self) -> None:
        if not self._has_begun:
            if not self._name:
                raise NoCallError
            self._begin()
            self._out.add_arguments("{}")
        self._expects = _Expects.NEXT if self._is_list else _Expects.NOTHING


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
        position = _behind_spaces(text, position)
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

    _value: _JsonValue | None = None

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
            position, self._value = begin, _JsonValue("{", self._call)
        start = position
        position, progress = self._value.read(text, position, is_end)
        self._out.add_arguments(text[start:position])
        return position, progress is not _Progress.MORE


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
            found = _IN_TEXT.search(text, position)
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
            position = _behind_spaces(text, position)
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


def call_reader(
    call: BoundCall, out: CallOutput, opening: str, groups: Mapping[str, str], tools: Mapping[str, str]
) -> CallReader:
    """`opening` is the mark, without one the call is the whole turn. `tools` are their schemas by name. Raises
    NoCallError.
    """
    form = call.form
    if form.body in (Body.CALL, Body.CALLS):
        return JsonCalls(call, out, opening, None if opening else frozenset(tools))
    name = groups.get(form.name, "").strip()
    if not name or not name.isprintable():
        raise NoCallError
    if form.body is Body.PAIRS:
        return PairedArguments(call, out, opening, name, tools.get(name, ""))
    return (LaxArguments if call.quotes or form.has_bare_keys else Arguments)(call, out, opening, name)


def _text_of(value: str) -> str:
    try:
        text = json.loads(value, strict=False)
    except ValueError as error:
        raise NoCallError from error
    if not isinstance(text, str):
        raise NoCallError
    return text


def _behind_spaces(text: str, position: int) -> int:
    while position < len(text) and text[position] in _SPACES:
        position += 1
    return position


def _inside(text: str) -> str:
    """As it stands inside of a JSON text."""
    return encode_basestring(text)[1:-1]


def _num_begun(text: str, position: int, mark: str) -> int:
    """How many characters at the end may begin the mark."""
    longest = min(len(mark) - 1, len(text) - position)
    return next((count for count in range(longest, 0, -1) if text.endswith(mark[:count])), 0)

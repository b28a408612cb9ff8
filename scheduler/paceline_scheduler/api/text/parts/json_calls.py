"""Calls that are JSON objects with the tool's name and its arguments, one or a list of them."""

import json
from enum import Enum

from paceline_scheduler.api.text.parts.bound import BoundCall
from paceline_scheduler.api.text.parts.reading import SPACES, CallOutput, JsonValue, NoCallError, Unsaid, ValueProgress
from paceline_scheduler.api.text.parts.template import Body

_MAX_NAME_CHARS = 1024


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
        self._value: JsonValue | None = None
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
            if progress is ValueProgress.MORE:
                return position, False
            self._end_value()
            if progress is ValueProgress.CLOSED:
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
                if progress is ValueProgress.MORE:
                    return position, False
                self._end_value()
                if progress is ValueProgress.CLOSED:
                    return position, self._give_up()
            elif (letter := text[position]) in SPACES:
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
        self._value = JsonValue(letter, self._call)
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


def _text_of(value: str) -> str:
    try:
        text = json.loads(value, strict=False)
    except ValueError as error:
        raise NoCallError from error
    if not isinstance(text, str):
        raise NoCallError
    return text

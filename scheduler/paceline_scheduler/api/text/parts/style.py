"""How a model's own chat template writes calls of tools, read from turns that it has rendered.

So what a grammar asks of a model is what it was trained on, to the space.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any

from paceline_scheduler.api.text.parts.bound import BoundCall, BoundTemplate
from paceline_scheduler.api.text.parts.patterns import Marks, Match
from paceline_scheduler.api.text.parts.template import Body

_END_OF_JSON = re.compile(r'["}\]\s]*')


class StyleError(ValueError):
    """The turns cannot be read; the sentence says why."""


class Slot(Enum):
    """What differs from call to call."""

    NAME = "name"
    ARGUMENTS = "arguments"
    ID = "id"


@dataclass(frozen=True, slots=True)
class ExampleCall:
    """One that no tool has."""

    id: str
    name: str
    arguments: Mapping[str, str]

    @property
    def call(self) -> dict[str, Any]:
        """As chat templates take it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"type": "function", "id": self.id, "function": function}

    @property
    def tool(self) -> dict[str, Any]:
        properties = {key: {"type": "string", "description": key} for key in self.arguments}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        function = {"name": self.name, "description": self.name, "parameters": parameters}
        return {"type": "function", "function": function}


EXAMPLES = (
    ExampleCall("Xexample1", "first_example", {"first_key": "first value", "second_key": "second value"}),
    ExampleCall("Xexample2", "second_example", {"third_key": "third value", "fourth_key": "fourth value"}),
)
"""The turns have the first of these, and both."""


@dataclass(frozen=True, slots=True)
class PairStyle:
    """What stands around each argument's name and value, and between two."""

    before_key: str
    before_value: str
    after_value: str
    between: str


@dataclass(frozen=True, slots=True)
class CallStyle:
    """Texts in the alphabet of the template. `between` is None where a turn has one call."""

    begin: str
    call: tuple[str | Slot, ...]
    between: str | None
    end: str
    pairs: PairStyle | None


@dataclass(frozen=True, slots=True)
class _FilledSlot:
    slot: Slot
    start: int
    end: int


def read_style(template: BoundTemplate, turn: str, both: str | None) -> CallStyle:
    """Of turns with one and with both examples, in the template's alphabet; None: a turn has one call. Raises
    StyleError.
    """
    call = template.call
    if call is None:
        raise StyleError("the template has no calls")
    found = list(_slots(turn, call, EXAMPLES[:1]))
    begin, end = found[0].start, found[-1].end
    pieces: list[str | Slot] = []
    for each, after in zip(found, (*found[1:], None), strict=True):
        pieces += [each.slot, turn[each.end : after.start]] if after else [each.slot]
    between = None if both is None else _between(both, call, len(found))
    pairs = _pairs(turn, call) if call.form.body is Body.PAIRS else None
    start = _start(template, call, turn)
    return CallStyle(turn[start:begin], tuple(pieces), between, _end(template, call, turn[end:]), pairs)


def _between(turn: str, call: BoundCall, num_slots: int) -> str:
    found = list(_slots(turn, call, EXAMPLES))
    return turn[found[num_slots - 1].end : found[num_slots].start]


def _start(template: BoundTemplate, call: BoundCall, turn: str) -> int:
    start, found, _ = Marks((*template.skipped, *call.opens)).search(turn, 0, is_end=True)
    if found is not None:
        return start
    if template.is_whole_turn and "{" in turn:
        return turn.index("{")
    raise StyleError("the turn has no opening mark")


def _end(template: BoundTemplate, call: BoundCall, behind: str) -> str:
    """Without what ends the turn."""
    marks = list(_all(Marks((*template.skipped, *call.closes.patterns)), behind))
    return behind[: marks[-1].end] if marks else _END_OF_JSON.match(behind)[0].rstrip()  # type: ignore[index]


def _slots(turn: str, call: BoundCall, examples: Sequence[ExampleCall]) -> Iterator[_FilledSlot]:
    """In their order. Raises StyleError."""
    found: list[_FilledSlot] = []
    for example in examples:
        found.append(_place(turn, Slot.NAME, example.name))
        start, end = _arguments(turn, call, example.arguments)
        found.append(_FilledSlot(Slot.ARGUMENTS, start, end))
        if example.id in turn:
            found.append(_place(turn, Slot.ID, example.id))
    found.sort(key=lambda each: each.start)
    if any(each.end > after.start for each, after in pairwise(found)):
        raise StyleError("the parts of the call stand in one another")
    yield from found


def _place(turn: str, slot: Slot, text: str) -> _FilledSlot:
    if turn.count(text) != 1:
        raise StyleError(f"the turn names the call's {slot.value} {turn.count(text)} times")
    return _FilledSlot(slot, turn.index(text), turn.index(text) + len(text))


def _arguments(turn: str, call: BoundCall, arguments: Mapping[str, str]) -> tuple[int, int]:
    if call.form.body is Body.PAIRS:
        tags = [(match.start, match) for match in _all(call.tags, turn)]
        opens = [start for start, match in tags if match.groups.get("key") in arguments]
        if len(opens) != len(arguments):
            raise StyleError("the turn does not have each argument once")
        _, close, _ = call.pair_close.search(turn, opens[-1], is_end=True)
        if close is None:
            raise StyleError("the turn does not close its last argument")
        return opens[0], close.end
    first, last = next(iter(arguments)), list(arguments.values())[-1]
    if turn.count(first) != 1 or turn.count(last) != 1:
        raise StyleError("the turn does not have each argument once")
    start = turn.rfind("{", 0, turn.index(first))
    if call.quotes or call.form.has_bare_keys:
        return start, turn.index("}", turn.index(last)) + 1
    try:
        value, end = json.JSONDecoder().raw_decode(turn, start)
    except ValueError:
        value, end = None, 0
    if value != arguments:
        raise StyleError("the turn does not have the arguments as JSON")
    return start, end


def _all(marks: Marks, text: str) -> Iterator[Match]:
    position = 0
    while (found := marks.search(text, position, is_end=True)[1]) is not None:
        yield found
        position = found.end


def _pairs(turn: str, call: BoundCall) -> PairStyle:
    (first_key, first), (second_key, second) = EXAMPLES[0].arguments.items()
    start, end = _arguments(turn, call, EXAMPLES[0].arguments)
    before_key = turn[start : turn.index(first_key)]
    before_value = turn[turn.index(first_key) + len(first_key) : turn.index(first)]
    after_value = turn[turn.index(second) + len(second) : end]
    next_key = turn.index(second_key) - len(before_key)
    between = turn[turn.index(first) + len(first) + len(after_value) : next_key]
    return PairStyle(before_key, before_value, after_value, between)

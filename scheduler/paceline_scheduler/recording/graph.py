"""Values of the scheduler as JSON and bytes, and back: events, and a core's whole state, with what it holds twice once.

Goes by the fields of classes, so that a new field is recorded without a line here; one that is the class's own default
is left out. Knows which classes there are, and makes no others. Refuses to know what they mean; `replace` may put
another value in the place of one of a class.
"""

import dataclasses
import json
import re
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from itertools import repeat
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from paceline.plan import sampling, values
from paceline_scheduler.access import tenant_limits
from paceline_scheduler.core import (
    events,
    executors,
    limits,
    live,
    outputs,
    phases,
    prefix,
    request,
    retained,
    state,
    suspects,
    tenants,
)
from paceline_scheduler.core.executor import attachment, group, ledger
from paceline_scheduler.core.planning import growth, speculation, step_time
from paceline_scheduler.core.queue import deadlines, waiting
from paceline_scheduler.core.requests import request_table
from paceline_scheduler.core.tables import blocks, rows

Value = Any  # of the scheduler's
Node = Any  # of JSON
Replacements = Mapping[type, Callable[[Value], Value]]

_MODULES: tuple[ModuleType, ...] = (
    *(sampling, values, tenant_limits, events, executors, limits, live, outputs, phases, prefix, request, retained),
    *(state, suspects, tenants, attachment, group, ledger, growth, speculation, step_time, deadlines, waiting),
    *(request_table, blocks, rows),
)
_DTYPE = re.compile(r"[<|][biuf][1248]")
_MANY = 64  # items of a mapping that is written as two columns
_MAX_INT = (1 << 63) - 1
_JSON = json.JSONEncoder(separators=(",", ":"))
_FUNCTIONS = frozenset({FunctionType, MethodType})
_PLAIN = frozenset({type(None), bool, int, float, str})


def _classes() -> Iterator[tuple[str, type]]:
    for module in _MODULES:
        for value in vars(module).values():
            if isinstance(value, type) and value.__module__ == module.__name__:
                yield _name(value), value


def _name(kind: type) -> str:
    return f"{kind.__module__.removeprefix('paceline_scheduler.')}.{kind.__qualname__}"


class GraphError(ValueError):
    """A value that has no form here, or bytes that are no value."""


class _Writer:
    def __init__(self, replacements: Replacements) -> None:
        self.columns = bytearray()
        self._replacements = replacements
        self._numbers: dict[int, int] = {}  # of objects and arrays, by identity
        self._kept: list[object] = []  # so that no identity is used again

    def node(self, value: Value) -> Node:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is tuple:
            return ["tuple", *map(self.node, value)]
        if kind is np.ndarray or kind in self._replacements:
            return self._shared(value)
        if isinstance(value, Enum):
            return ["enum", _known(kind), value.value]
        if isinstance(value, tuple):
            return ["named", _known(kind), *map(self.node, value)]
        if kind is bytes:
            return ["bytes", *self._place(value)]
        if isinstance(value, list | set | frozenset):
            return [kind.__name__, *map(self.node, value)]
        if isinstance(value, Mapping) and len(value) >= _MANY:
            packed = self._packed(value)
            if packed is not None:
                return packed
        if isinstance(value, OrderedDict):
            return ["ordered", *([self.node(key), self.node(each)] for key, each in value.items())]
        if isinstance(value, Mapping):
            return ["dict", *([self.node(key), self.node(each)] for key, each in value.items())]
        if isinstance(value, deque):
            return ["deque", value.maxlen, *map(self.node, value)]
        if isinstance(value, array):
            return ["ints", value.typecode, *self._place(value.tobytes())]
        return self._shared(value)

    def _shared(self, value: Value) -> Node:
        """Write what two may hold: the second time its number."""
        number = self._numbers.get(id(value))
        if number is not None:
            return ["again", number]
        number = self._numbers[id(value)] = len(self._numbers)
        self._kept.append(value)
        if isinstance(value, np.ndarray | np.generic):
            return ["array", number, value.dtype.str, list(value.shape), *self._place(value.tobytes())]
        kind = type(value)
        replace = self._replacements.get(kind)
        if replace is not None:
            value = replace(value)
            self._kept.append(value)
        return ["object", number, _known(kind), self._fields(value)]

    def _fields(self, value: Value) -> dict[str, Node]:
        fields: dict[str, Node] = {}
        for name, default in _slots_of(type(value)):
            each = getattr(value, name)
            if each is default:
                continue
            kind = type(each)
            if kind in _PLAIN:
                fields[name] = each
            elif kind not in _FUNCTIONS:  # those are put back by who restores the object
                fields[name] = self.node(each)
        for name, each in getattr(value, "__dict__", {}).items():
            # What a class notes of itself is none of its values.
            if type(each) not in _FUNCTIONS and not name.startswith("__"):
                fields[name] = self.node(each)
        return fields

    def _packed(self, value: Mapping[Value, Value]) -> Node | None:
        """As two columns, if keys and values have such a form."""
        columns = [_column(tuple(value)), _column(tuple(value.values()))]
        if None in columns:
            return None
        kind = "ordered" if isinstance(value, OrderedDict) else "dict"
        return ["packed", kind, *([name, size, *self._place(data)] for name, size, data in filter(None, columns))]

    def _place(self, data: bytes) -> tuple[int, int]:
        begin = len(self.columns)
        self.columns += data
        return begin, len(data)


def _column(items: tuple[Value, ...]) -> tuple[str, int, bytes] | None:
    """Return the kind, the bytes of one, and those of all; of None there is only the number."""
    kinds = set(map(type, items))
    if kinds == {int} and max(map(abs, items)) <= _MAX_INT:
        return "int", 8, np.array(items, dtype="<i8").tobytes()
    if kinds == {bytes} and len(set(map(len, items))) == 1 and items[0]:
        return "bytes", len(items[0]), b"".join(items)
    return ("none", len(items), b"") if kinds == {type(None)} else None


def _known(kind: type) -> str:
    name = _NAMES.get(kind)
    if name is None:
        raise GraphError(f"a value of {_name(kind)} has no form in recordings")
    return name


def _slots_of(kind: type) -> tuple[tuple[str, Value], ...]:
    found = _SLOTS.get(kind)
    if found is None:
        found = _SLOTS[kind] = _slots(kind)
    return found


def _slots(kind: type) -> tuple[tuple[str, Value], ...]:
    """Also inherited ones, each with its default."""
    slots = [vars(each).get("__slots__", ()) for each in kind.__mro__]
    names = [name for each in slots for name in ((each,) if isinstance(each, str) else each)]
    defaults = {}
    if dataclasses.is_dataclass(kind):
        defaults = {each.name: each.default for each in dataclasses.fields(kind)}
    return tuple((name, defaults.get(name, dataclasses.MISSING)) for name in names if not name.startswith("__"))


class _Reader:
    def __init__(self, columns: bytes) -> None:
        self._columns = columns
        self._found: dict[int, Value] = {}

    def value(self, node: Node) -> Value:
        if not isinstance(node, list):
            return node
        match node:
            case ["enum", str(name), of]:
                return _class(name, Enum)(of)
            case ["tuple", *items]:
                return tuple(map(self.value, items))
            case ["named", str(name), *items]:
                return _class(name, tuple)(*map(self.value, items))
            case ["list", *items]:
                return list(map(self.value, items))
            case ["set", *items]:
                return set(map(self.value, items))
            case ["frozenset", *items]:
                return frozenset(map(self.value, items))
            case ["dict", *pairs]:
                return {self.value(key): self.value(each) for key, each in pairs}
            case ["ordered", *pairs]:
                return OrderedDict((self.value(key), self.value(each)) for key, each in pairs)
            case ["deque", most, *items]:
                return deque(map(self.value, items), maxlen=most)
            case ["packed", "ordered" | "dict" as kind, ["int" | "bytes" as name, *of_keys], list(values)]:
                both = zip(self._column([name, *of_keys]), self._column(values), strict=True)
                return OrderedDict(both) if kind == "ordered" else dict(both)
            case ["bytes", int(begin), int(length)]:
                return self._columns[begin : begin + length]
            case ["ints", "i", int(begin), int(length)]:
                return array("i", self._columns[begin : begin + length])
            case ["again", int(number)]:
                return self._found[number]
            case ["array", int(number), str(dtype), list(shape), int(begin), int(length)] if _DTYPE.fullmatch(dtype):
                data = np.frombuffer(self._columns[begin : begin + length], dtype=np.dtype(dtype))
                self._found[number] = data.reshape(shape).copy() if shape else data[0]
                return self._found[number]
            case ["object", int(number), str(name), dict(fields)]:
                return self._object(number, _class(name, object), fields)
        raise GraphError(f"{str(node)[:80]} is no value")

    def _column(self, node: Node) -> Iterable[Value]:
        match node:
            case ["int", 8, int(begin), int(length)]:
                return list(array("q", np.frombuffer(self._columns[begin : begin + length], dtype="<i8").tobytes()))
            case ["bytes", int(size), int(begin), int(length)] if size > 0 and begin + length <= len(self._columns):
                return [self._columns[at : at + size] for at in range(begin, begin + length, size)]
            case ["none", int(number), _, _]:
                return repeat(None, number)
        raise GraphError(f"{str(node)[:80]} is no column")

    def _object(self, number: int, kind: type, fields: dict[str, Node]) -> Value:
        made: Value = object.__new__(kind)
        self._found[number] = made
        for name, node in fields.items():
            object.__setattr__(made, name, self.value(node))
        if dataclasses.is_dataclass(kind):
            # What was left out, or an earlier version of the program did not know.
            for each in dataclasses.fields(kind):
                if each.name not in fields and each.default is not dataclasses.MISSING:
                    object.__setattr__(made, each.name, each.default)
        return made


def _class(name: str, base: type) -> Value:
    kind = CLASSES.get(name)
    if kind is None or not issubclass(kind, base):
        raise GraphError(f"this version of the program knows no {name}")
    return kind


def write_value(value: object, replacements: Replacements) -> tuple[str, bytes]:
    """As JSON, and the arrays and bytes that this points into. Raises GraphError."""
    writer = _Writer(replacements)
    return _JSON.encode(writer.node(value)), bytes(writer.columns)


def read_value(graph: str, columns: bytes) -> Value:
    """Raises GraphError for what is no value of this program."""
    try:
        return _Reader(columns).value(json.loads(graph))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise GraphError(f"not a value of this version of the program: {error}") from error


CLASSES: Mapping[str, type] = dict(_classes())
_NAMES = {kind: name for name, kind in CLASSES.items()}
_SLOTS: dict[type, tuple[tuple[str, Value], ...]] = {}

"""Messages of the plan protocol in which one field is beyond its bound, made by walking the table of bounds.

For tests of whoever reads them: the codec, a scheduler, an executor.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from paceline.plan.codec.bound_kinds import (
    Bound,
    Column,
    Data,
    Floats,
    Inside,
    Many,
    Pairs,
    Period,
    Real,
    TextLength,
    Unread,
    Whole,
)
from paceline.plan.codec.bounds import TABLE

_LONG = 1 << 20  # longer ones do not fit into a part of a snapshot
_MAX_COLUMN = 1 << 24  # a column too long for its bound is made up to this
_WIDEST = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_BOOL: (0, 1),
}

Field = Any  # the generic type differs from that of protobuf's fast implementation
Path = tuple[Field, ...]


def paths(descriptor: Any, path: Path = ()) -> Iterator[Path]:  # noqa: ANN401  # as Field
    """Yields all fields that a message holds, each with the way to it."""
    for field in descriptor.fields:
        yield (*path, field)
        inner = field.message_type
        if inner is not None and inner.full_name != Duration.DESCRIPTOR.full_name and not inner.GetOptions().map_entry:
            yield from paths(inner, (*path, field))


def name_of(path: Path) -> str:
    return ".".join([path[0].containing_type.name, *(field.name for field in path)])


def bound_of(field: Field) -> Bound:
    return TABLE[GetMessageClass(field.containing_type)][field.name]


def kind_of(field: Field) -> type[Message]:
    return GetMessageClass(field.message_type)


def values_within(field: Field) -> list[Any]:
    return _values(field)[0]


def values_beyond(field: Field) -> list[Any]:
    """Just beyond, far beyond, negative, no number, too much of it."""
    return _values(field)[1]


def sound(kind: type[Message]) -> Message:
    message = kind()
    for name, bound in TABLE[kind].items():
        match bound:
            case Whole(low, _) if low > 0:
                setattr(message, name, low)
            case TextLength(low, _) if low > 0:
                setattr(message, name, "x")
            case Data(low, _) if low > 0:
                setattr(message, name, bytes(low))
            case Inside(is_needed=True):
                getattr(message, name).CopyFrom(sound(kind_of(kind.DESCRIPTOR.fields_by_name[name])))
    return message


def with_value(path: Path, value: object) -> Message:
    """Only this field is unsound."""
    whole = message = sound(GetMessageClass(path[0].containing_type))
    for field in path[:-1]:
        inner = getattr(message, field.name)
        if field.is_repeated:
            inner.append(sound(kind_of(field)))
            message = inner[0]
        else:
            inner.CopyFrom(sound(kind_of(field)))
            message = inner
    _put(message, path[-1], value)
    return whole


def _put(message: Message, field: Field, value: Any) -> None:  # noqa: ANN401  # whatever a field holds
    """A number for a list of messages is how many."""
    match bound_of(field):
        case Many(each=None):
            getattr(message, field.name).extend([sound(kind_of(field))] * value)
        case Many():
            getattr(message, field.name).extend(value)
        case Pairs():
            getattr(message, field.name).update(value)
        case Period():
            getattr(message, field.name).CopyFrom(value)
        case _:
            setattr(message, field.name, value)


def _values(field: Field) -> tuple[list[Any], list[Any]]:
    match bound_of(field):
        case Whole(low, high):
            return [low, high], _numbers_beyond(field, low, high)
        case Real(low, high):
            return _reals(low, high)
        case TextLength(low, high, is_name):
            controls = ["\x1b[31m", "a\nb", "\x9b"] if is_name else []
            return ["x" * low, "x" * high, "ö" * (high // 2)], ["x" * (high + 1), "ö" * high, *controls, *[""] * low]
        case Data(low, high):
            return [bytes(low), bytes(min(high, _LONG))], [bytes(high + 1), *[b""] * low]
        case Column(high, _) if field.cpp_type == FieldDescriptor.CPPTYPE_INT32:  # many of them become a column
            return [0, high], [-1, -(2**31)]
        case Floats(low, high, _) if field.cpp_type == FieldDescriptor.CPPTYPE_FLOAT:
            return _reals(low, high)
        case Column(high, at_most):
            return [_column(0, high)], _columns_beyond(high, at_most)
        case Floats(low, high, _):
            within, beyond = _reals(low, high)
            return [_floats(*within)], [_floats(value) for value in beyond]
        case Many(at_most, None):
            return [1], [at_most + 1]
        case Many(at_most, Whole(low, high)):
            outside = high + 1 if high < 2**31 - 1 else -1
            return [[low, high]], [[outside], [low] * (at_most + 1)]
        case Many(at_most, TextLength(_, high)):
            return [["x", "x" * high]], [["x" * (high + 1)], ["x"] * (at_most + 1)]
        case Pairs(at_most, TextLength(_, longest_key), TextLength(_, longest)):
            fit = {f"{number}": "x" * longest for number in range(at_most)}
            too_long = [{"x" * (longest_key + 1): ""}, {"x": "x" * (longest + 1)}]
            return [fit, {"x" * longest_key: ""}], [fit | {"x": ""}, *too_long]
        case Pairs(at_most, key, value):
            beyond_pairs = [dict.fromkeys(range(at_most + 1), 0.0), {-1: 0.0}, {1: math.nan}, {key.high: math.inf}]
            return [dict.fromkeys(range(at_most), value.high)], beyond_pairs
        case Period(seconds):
            wrong = [(seconds + 1, 0), (-1, 0), (2**63 - 1, 0), (0, -1), (0, 2**31 - 1)]
            return [Duration(seconds=seconds)], [Duration(seconds=s, nanos=n) for s, n in wrong]
        case Inside() | Unread():
            return [], []
    raise AssertionError("every kind of bound is among these")


def _numbers_beyond(field: Field, low: int, high: int) -> list[int]:
    lowest, highest = _WIDEST[field.cpp_type]
    numbers = [number for number in (high + 1, highest, low - 1, lowest, 0) if lowest <= number <= highest]
    return [number for number in numbers if not low <= number <= high and (number or not field.has_presence)]


def _columns_beyond(high: int, at_most: int) -> list[bytes]:
    columns = [_column(-1), _column(0, -(2**31))]
    if high < 2**31 - 1:
        columns.append(_column(high + 1))
    return columns + ([bytes(4 * (at_most + 1))] if at_most < _MAX_COLUMN else [])


def _reals(low: float, high: float) -> tuple[list[float], list[float]]:
    """Single precision has these numbers."""
    above = float(np.nextafter(np.float32(high), np.float32(math.inf)))
    below = [] if math.isinf(low) else [-math.inf, float(np.nextafter(np.float32(low), np.float32(-math.inf))), -3e38]
    return [low, high], [math.nan, math.inf, above, 3e38, *below]


def _column(*values: int) -> bytes:
    return np.array(values, dtype="<i4").tobytes()


def _floats(*values: float) -> bytes:
    return np.array(values, dtype="<f4").tobytes()

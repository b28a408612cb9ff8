"""The kinds of bound that a field can have: ranges, lengths, counts. Each says of a value what is wrong with it.

Knows no field. NaN is in no range; columns are looked at by numpy, and as they travel.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from paceline.plan.texts import has_control_characters
from paceline.plan.values import Float32Array, Int32Array

_UNSIGNED = np.dtype("<u4")


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number."""

    low: int
    high: int

    def fault(self, value: int) -> str | None:
        """Return what is wrong with a value, None if nothing is; so with every kind of bound."""
        return None if self.low <= value <= self.high else f"is {value}, must be {self.low} to {self.high}"


@dataclass(frozen=True, slots=True)
class Real:
    """A number that is one: NaN is in no range."""

    low: float
    high: float

    def fault(self, value: float) -> str | None:
        """Not within, or NaN."""
        return None if self.low <= value <= self.high else f"is {value:.7g}, must be {self.low:.7g} to {self.high:.7g}"


@dataclass(frozen=True, slots=True)
class TextLength:
    """So many bytes of UTF-8; a name is free of control characters too."""

    low: int
    high: int
    is_name: bool = True

    def fault(self, value: str) -> str | None:
        """Too short, too long, or no name."""
        num_bytes = len(value.encode())
        if not self.low <= num_bytes <= self.high:
            return f"has {num_bytes} bytes, must have {self.low} to {self.high}"
        return "holds control characters" if self.is_name and has_control_characters(value) else None


@dataclass(frozen=True, slots=True)
class Data:
    """So many bytes."""

    low: int
    high: int

    def fault(self, value: bytes) -> str | None:
        """Too short or too long."""
        return (
            None
            if self.low <= len(value) <= self.high
            else f"has {len(value)} bytes, must have {self.low} to {self.high}"
        )


@dataclass(frozen=True, slots=True)
class Column:
    """At most so many int32 values from 0 to `high`. What is no column is for whoever reads it."""

    high: int
    at_most: int

    def fault(self, data: bytes) -> str | None:
        """Too long, or a value that is beyond."""
        if len(data) > 4 * self.at_most:
            return f"has {len(data) // 4} values, at most {self.at_most} are allowed"
        # As unsigned numbers, so that one below 0 is more than all others.
        if not data or len(data) % 4 or np.maximum.reduce(np.frombuffer(data, _UNSIGNED)) <= self.high:
            return None
        return self.fault_of(np.frombuffer(data, "<i4"))

    def fault_of(self, values: Int32Array) -> str | None:
        """Of values that are a column already: the first one that is beyond."""
        outside = values[(values < 0) | (values > self.high)]
        return f"holds {outside.flat[0]}, must hold 0 to {self.high}" if outside.size else None


@dataclass(frozen=True, slots=True)
class Floats:
    """At most so many float values from `low` to `high`, none of them NaN."""

    low: float
    high: float
    at_most: int

    def fault(self, data: bytes) -> str | None:
        """Too long, or a value that is beyond or no number."""
        if len(data) > 4 * self.at_most:
            return f"has {len(data) // 4} values, at most {self.at_most} are allowed"
        return None if len(data) % 4 else self.fault_of(np.frombuffer(data, "<f4"))

    def fault_of(self, values: Float32Array) -> str | None:
        """Of values that are a column already: the first one that is beyond."""
        if np.count_nonzero((values >= self.low) & (values <= self.high)) == values.size:
            return None
        outside = values[~((values >= self.low) & (values <= self.high))]
        return f"holds {outside.flat[0]:.7g}, must hold {self.low:.7g} to {self.high:.7g}"


@dataclass(frozen=True, slots=True)
class Many:
    """At most so many values or messages; `each` is the bound of a value, messages have lines of their own."""

    at_most: int
    each: Whole | TextLength | None = None

    def fault(self, values: Sequence[Any]) -> str | None:
        """Too many, or a value that is beyond."""
        if len(values) > self.at_most:
            return f"has {len(values)} elements, at most {self.at_most} are allowed"
        return None if self.each is None else next((fault for fault in map(self.each.fault, values) if fault), None)


@dataclass(frozen=True, slots=True)
class Pairs:
    """At most so many pairs of a key and a value."""

    at_most: int
    key: Whole | TextLength
    value: Real | TextLength

    def fault(self, pairs: Mapping[Any, Any]) -> str | None:
        """Too many, or a key or value that is beyond."""
        if len(pairs) > self.at_most:
            return f"has {len(pairs)} pairs, at most {self.at_most} are allowed"
        faults = (self.key.fault(key) or self.value.fault(value) for key, value in pairs.items())
        return next((fault for fault in faults if fault), None)


@dataclass(frozen=True, slots=True)
class Period:
    """A duration, from none to so many seconds."""

    seconds: int

    def fault(self, value: Duration) -> str | None:
        """Negative, too long, or no duration."""
        fits = 0 <= value.seconds <= self.seconds and 0 <= value.nanos < 1_000_000_000
        return None if fits else f"is {value.seconds} s and {value.nanos} ns, must be 0 to {self.seconds} s"


@dataclass(frozen=True, slots=True)
class Inside:
    """A message, whose fields have their own lines. Where it is needed, one that is unset is one of zeros."""

    is_needed: bool = False
    is_looked_into: bool = True

    def fault(self, value: Message) -> None:
        """Nothing is wrong with it beside its fields."""
        del value


@dataclass(frozen=True, slots=True)
class Unread:
    """A field that no side reads yet."""

    def fault(self, value: object) -> None:
        """Nothing is made of it."""
        del value


Bound = Whole | Real | TextLength | Data | Column | Floats | Many | Pairs | Period | Inside | Unread

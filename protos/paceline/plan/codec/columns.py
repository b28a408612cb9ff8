"""Columns and whole messages, to and from bytes; and what is said of bytes that are none."""

from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

from paceline.plan.values import NO_COLUMN, Float32Array, Int32Array

_M = TypeVar("_M", bound=Message)


class MalformedError(ValueError):
    """Bytes that are no message of the protocol; `field` names what is wrong, empty where that is the whole message."""

    def __init__(self, field: str, sentence: str) -> None:
        super().__init__(sentence)
        self.field = field


class ColumnError(MalformedError):
    """A column that is none, or columns that do not belong together."""


def refuse_unsupported(message: Message, *fields: str) -> None:
    """Raise MalformedError, which names the field, where a message has one that this version does not act on."""
    for field in fields:
        if getattr(message, field):
            raise MalformedError(field, f"{field} is not supported by this version")


def parse(kind: type[_M], data: bytes) -> _M:
    """Return the protobuf message of these bytes. Raises MalformedError."""
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise MalformedError("", f"{len(data)} bytes are not a message of type {kind.__name__}") from error
    return message


def fields_set(message: Message, names: Iterable[str]) -> dict[str, Any]:
    """Return the fields of these names that are set, as they were sent."""
    return {name: getattr(message, name) for name in names if message.HasField(name)}


def column_bytes(values: Int32Array) -> bytes:
    """Return a column as it travels."""
    return values.astype("<i4", copy=False).tobytes()


def read_column(field: str, data: bytes) -> Int32Array:
    """Return the values of a column, read-only. Raises MalformedError."""
    if len(data) % 4:
        raise ColumnError(field, f"{field} has {len(data)} bytes; a column must have a multiple of 4")
    return np.frombuffer(data, dtype="<i4").astype(np.int32, copy=False) if data else NO_COLUMN


def read_floats(field: str, data: bytes) -> Float32Array:
    if len(data) % 4:
        raise ColumnError(field, f"{field} has {len(data)} bytes; a column of floats must have a multiple of 4")
    return np.frombuffer(data, dtype="<f4").astype(np.float32, copy=False)


def float_bytes(values: Float32Array) -> bytes:
    return values.astype("<f4", copy=False).tobytes()

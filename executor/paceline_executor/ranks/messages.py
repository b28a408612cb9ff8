"""What rank 0 tells the others, as bytes: a step's batch, blocks to copy, that steps are to be prepared.

A value becomes words that say what it is, in order, and the bytes of its arrays behind them. Only what stands in the
tables here can be sent, so whoever reads makes nothing else. Refuses to know how bytes travel.
"""

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any

import numpy as np

from paceline_executor.errors import RankError
from paceline_executor.runner.interface import (
    NO_CELLS,
    NOTHING_DESCRIBED,
    BlockCells,
    ForcedDrafts,
    HostTokenLists,
    Int32Array,
    PromptTargets,
    RowDescriptions,
    SamplingColumns,
    StepBatch,
    StepMasks,
)
from paceline_executor.runner.row_rules import RowRules

_WORD = 8


@dataclass(frozen=True, slots=True)
class Prepare:
    """Whatever is captured, before the first step."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Of the step launched last, when those before it have landed. None where nobody wants what is drawn."""

    masks: StepMasks | None


@dataclass(frozen=True, slots=True)
class Copy:
    sources: Int32Array
    destinations: Int32Array


Message = Prepare | Copy | StepBatch | Draw
_MESSAGES = (Prepare, Copy, StepBatch, Draw)

_NONE, _INT, _FLOAT, _TUPLE, _MAPPING, _ARRAY, _CLASS, _CONSTANT = 0, 1, 2, 3, 4, 8, 16, 32
_CONSTANTS = (NOTHING_DESCRIBED, NO_CELLS)  # most batches have both
_DTYPES = tuple(np.dtype(kind) for kind in ("<i4", "<f4", "<u8"))
_CLASSES: tuple[type[Any], ...] = (
    *_MESSAGES,
    *(RowDescriptions, SamplingColumns, HostTokenLists, BlockCells, PromptTargets, RowRules, StepMasks, ForcedDrafts),
)
_CODES = {
    kind: code for start, kinds in ((_ARRAY, _DTYPES), (_CLASS, _CLASSES)) for code, kind in enumerate(kinds, start)
}
_CODES_OF_CONSTANTS = {id(constant): code for code, constant in enumerate(_CONSTANTS, _CONSTANT)}
_FIELDS = {kind: tuple(each.name for each in fields(kind)) for kind in _CLASSES}


def encode(message: Message) -> bytes:
    writer = _MessageWriter()
    writer.put(message)
    return b"".join((struct.pack(f"<{1 + len(writer.words)}q", len(writer.words), *writer.words), *writer.arrays))


def decode(data: bytearray) -> Message:
    """Its arrays lie in `data`. Raises RankError for bytes that are no message."""
    try:
        reader = _MessageReader(data)
        message = reader.take()
        reader.check_end()
    except (ValueError, LookupError, StopIteration, TypeError, OverflowError, RecursionError, struct.error) as error:
        raise RankError(f"what rank 0 sent is no message ({error}): give all ranks one version") from error
    if not isinstance(message, _MESSAGES):
        raise RankError(f"what rank 0 sent is a {type(message).__name__}: give all ranks one version")
    return message


class _MessageWriter:
    def __init__(self) -> None:
        self.words: list[int] = []
        self.arrays: list[bytes] = []  # padded to whole words

    def put(self, value: object) -> None:
        kind, words = type(value), self.words
        if (code := _CODES_OF_CONSTANTS.get(id(value))) is not None:
            words.append(code)
        elif isinstance(value, np.ndarray):
            words += (_CODES[value.dtype], value.ndim, *value.shape)
            if value.size:
                self.arrays += (value.tobytes(), bytes(-value.nbytes % _WORD))
        elif kind in _FIELDS:
            words.append(_CODES[kind])
            for name in _FIELDS[kind]:
                self.put(getattr(value, name))
        elif value is None:
            words.append(_NONE)
        elif isinstance(value, float):
            words += (_FLOAT, *struct.unpack("<q", struct.pack("<d", value)))
        elif isinstance(value, tuple | Mapping):
            words += (_TUPLE if isinstance(value, tuple) else _MAPPING, len(value))
            for each in value if isinstance(value, tuple) else chain(*value.items()):
                self.put(each)
        else:
            words += (_INT, int(value))  # type: ignore[call-overload]


class _MessageReader:
    def __init__(self, data: bytearray) -> None:
        (num_words,) = struct.unpack_from("<q", data)
        self._words: Iterator[int] = iter(struct.unpack_from(f"<{num_words}q", data, _WORD))
        self._data = data
        self._start = _WORD * (1 + num_words)  # of the next array

    def take(self) -> Any:  # noqa: ANN401, of what is sent
        code = next(self._words)
        if code >= _CONSTANT:
            return _CONSTANTS[code - _CONSTANT]
        if code >= _CLASS:
            kind = _CLASSES[code - _CLASS]
            return kind(*[self.take() for _ in _FIELDS[kind]])
        if code >= _ARRAY:
            return self._array(_DTYPES[code - _ARRAY])
        if code == _NONE:
            return None
        word = next(self._words)
        if code == _INT:
            return word
        if code == _FLOAT:
            return struct.unpack("<d", struct.pack("<q", word))[0]
        if code == _TUPLE:
            return tuple([self.take() for _ in range(word)])
        if code == _MAPPING:
            return {self.take(): self.take() for _ in range(word)}
        raise ValueError(f"no value has code {code}")

    def check_end(self) -> None:
        if self._start != len(self._data):
            raise ValueError(f"{len(self._data)} bytes came, and {self._start} were due")

    def _array(self, dtype: np.dtype[Any]) -> np.ndarray:
        shape = [next(self._words) for _ in range(next(self._words))]
        if shape == [0]:  # most are
            return np.empty(0, dtype)
        size = math.prod(shape)
        if min(shape, default=0) < 0:
            raise ValueError(f"no array is {shape} in size")
        array = np.frombuffer(self._data, dtype, size, self._start) if size else np.empty(0, dtype)
        self._start += -(-array.nbytes // _WORD) * _WORD
        return array.reshape(shape)

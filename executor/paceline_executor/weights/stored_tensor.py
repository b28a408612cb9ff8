"""A tensor as a file stores it: which numbers it is made of, how many, and where their bytes lie.

Refuses to know file formats, and what the numbers become.

Bytes are read into memory of the caller's and never mapped: a file that shrinks under a mapping kills the process
instead of raising, and a device takes bytes faster from pinned memory.
"""

import enum
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from paceline_executor.weights.refusals import damaged

ByteArray = npt.NDArray[np.uint8]
Int64Array = npt.NDArray[np.int64]


class FloatType(enum.Enum):
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8_E4M3FN = "float8_e4m3fn"

    @property
    def itemsize(self) -> int:
        """In bytes."""
        return _ITEM_BYTES[self]


@dataclass(frozen=True, slots=True)
class GroupedType:
    """Of a matrix whose numbers share scales in groups of inputs: several tensors (`grouped_rows`), or blocks."""

    name: str  # for people: the format and what its codes are, such as "gptq-int4"
    bits: int  # of a code: 4 or 8
    is_linear: bool = True  # a code is a whole number, not a float or the place of a number in a table
    # What kernels are compiled for before the matrix is read, which is to be expected.
    group: int = 0  # inputs that share a scale; 0: all
    scales: FloatType = FloatType.FLOAT32
    has_zeros: bool = False
    has_minima: bool = False  # of the scales' type
    is_ordered: bool = False  # inputs that share a scale may be anywhere in a row
    # Codes are int8, with a scale for each row alone; made to be multiplied with inputs that are rounded likewise.
    is_w8a8: bool = False


PlainType = FloatType | GGMLQuantizationType
"""Floats, or the blocks of GGUF files, whose own floats are `FloatType`s, too: one tensor each."""
StoredType = PlainType | GroupedType

_ITEM_BYTES = {FloatType.FLOAT32: 4, FloatType.FLOAT16: 2, FloatType.BFLOAT16: 2, FloatType.FLOAT8_E4M3FN: 1}


# Those of 5 and 6 bits have codes of 8. K's scales are products of two numbers.
_BLOCKS: Mapping[StoredType | None, GroupedType] = {
    GGMLQuantizationType[name]: GroupedType(name, bits, group=group, scales=scales, has_minima=has_minima)
    for name, bits, group, scales, has_minima in (
        ("Q4_0", 4, 32, FloatType.FLOAT16, False),
        ("Q4_1", 4, 32, FloatType.FLOAT16, True),
        ("Q5_0", 8, 32, FloatType.FLOAT16, False),
        ("Q5_1", 8, 32, FloatType.FLOAT16, True),
        ("Q8_0", 8, 32, FloatType.FLOAT16, False),
        ("Q4_K", 4, 32, FloatType.FLOAT32, True),
        ("Q5_K", 8, 32, FloatType.FLOAT32, True),
        ("Q6_K", 8, 16, FloatType.FLOAT32, False),
    )
}


def grouped_type(stored: StoredType | None) -> GroupedType | None:
    """None for floats, and for blocks that are not integers in groups."""
    return stored if isinstance(stored, GroupedType) else _BLOCKS.get(stored)


def has_linear_4_bits(stored: StoredType) -> bool:
    """Whether codes of 4 bits, with scales and zeros or minima of groups, are all that a matrix is."""
    grouped = grouped_type(stored)
    return grouped is not None and grouped.bits == 4 and grouped.is_linear


def are_w8a8(types: Iterable[StoredType | None]) -> bool:
    """Whether matrices side by side all are."""
    return all(isinstance(stored, GroupedType) and stored.is_w8a8 for stored in types)


def block_sizes(stored: PlainType) -> tuple[int, int]:
    """(numbers, bytes) of the smallest part that can be read by itself."""
    if isinstance(stored, FloatType):
        return 1, stored.itemsize
    numbers, num_bytes = GGML_QUANT_SIZES[stored]
    return numbers, num_bytes


class ByteSource(Protocol):
    """Any number of threads may read at a time."""

    @property
    def path(self) -> Path:
        """What errors name."""
        ...

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fills it with the bytes from `start` on. Raises ModelCorruptError where they are not there."""
        ...


@dataclass(frozen=True, slots=True)
class FileBytes:
    """The file is open only while it is read."""

    path: Path

    def read_into(self, buffer: memoryview, start: int) -> None:
        try:
            with self.path.open("rb", buffering=0) as file:
                while buffer:
                    num_read = os.preadv(file.fileno(), [buffer], start)
                    if num_read == 0:
                        raise damaged(self.path, "it became shorter after it was opened")
                    buffer, start = buffer[num_read:], start + num_read
        except OSError as error:
            raise damaged(self.path, f"reading it failed ({error.strerror or error})") from error


@dataclass(frozen=True, slots=True)
class MemoryBytes:
    """Has no file."""

    data: bytes
    path: Path = Path("memory")

    def read_into(self, buffer: memoryview, start: int) -> None:
        buffer[:] = self.data[start : start + buffer.nbytes]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Whoever makes it has checked that its bytes are there and fit the shape.

    A row is what shares the first index; of a list of numbers each is one.
    """

    name: str  # in the file
    stored: PlainType
    shape: tuple[int, ...]
    source: ByteSource
    start: int  # of its bytes in the source
    # Where not 0, the two halves of each of so many heads are interleaved: row 2 i + j of a head stands for its row j *
    # head_dim / 2 + i.
    interleaved_heads: int = 0
    # Of float8_e4m3fn: one number for all, or one for each row; None is 1.
    scales: "StoredTensor | None" = None

    @property
    def num_rows(self) -> int:
        """Returns at least 1."""
        return self.shape[0] if self.shape else 1

    @property
    def row_numbers(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def row_bytes(self) -> int:
        numbers, num_bytes = block_sizes(self.stored)
        return self.row_numbers // numbers * num_bytes

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes

    def read(self) -> ByteArray:
        """[rows, bytes per row], in the order of the file. Raises ModelCorruptError."""
        rows = np.empty((self.num_rows, self.row_bytes), np.uint8)
        if rows.size:
            read_rows_into(self, rows.reshape(-1).data, 0)
        return rows

    def place_of_row(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """From rows of the file to rows of the model."""
        if not self.interleaved_heads:
            return rows
        head_dim = self.num_rows // self.interleaved_heads
        heads, within = np.divmod(rows, head_dim)
        places: npt.NDArray[np.int64] = heads * head_dim + within % 2 * (head_dim // 2) + within // 2
        return places


@dataclass(frozen=True, slots=True)
class StoredIntegers:
    """Whole numbers or flags as a file stores them: a drafter's map of token ids, or the codes of quantised weights."""

    name: str  # in the file
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    source: ByteSource
    start: int  # of the bytes in the source

    @property
    def num_rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes

    def read(self) -> Int64Array:
        """All of them; a flag is 0 or 1. Raises ModelCorruptError."""
        return self.as_stored().astype(np.int64)

    def as_stored(self) -> npt.NDArray[np.generic]:
        """In its own type. Raises ModelCorruptError."""
        data = np.empty(self.num_bytes, np.uint8)
        if data.size:
            self.source.read_into(data.data, self.start)
        return data.view(self.dtype).reshape(self.shape)


Stored = StoredTensor | StoredIntegers


def read_rows_into(tensor: Stored, buffer: memoryview, first_row: int) -> None:
    """Rows are in the order of the file.

    Raises ModelCorruptError, and ValueError for more than there is.
    """
    start = first_row * tensor.row_bytes
    if not 0 <= start <= start + buffer.nbytes <= tensor.num_bytes:
        raise ValueError(f"{buffer.nbytes} bytes from row {first_row} on are not all of {tensor.name}")
    tensor.source.read_into(buffer, tensor.start + start)


def first_bytes(tensor: Stored, at_most: int) -> bytes:
    """Raises ModelCorruptError."""
    data = bytearray(min(tensor.num_bytes, at_most))
    tensor.source.read_into(memoryview(data), tensor.start)
    return bytes(data)

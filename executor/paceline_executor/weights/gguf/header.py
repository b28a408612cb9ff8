"""Reads the header of a GGUF file, trusting nothing in it: metadata values and where each tensor lies.

Follows "File Structure" of docs/gguf.md in the ggml project, versions 2 and 3, little-endian. The gguf library's own
reader takes every count, length and offset at its word; this one checks each against the file's size and a fixed bound
before memory is taken for it. No key and no tensor name means anything here, except `general.alignment`, which the
layout depends on.
"""

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from paceline.process.small_files import open_regular
from paceline_executor.weights.refusals import damaged, shown, unreadable, unsupported, wrong

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 16
MAX_HEADER_BYTES = 128 << 20  # the largest vocabularies in use need a sixth of it
MAX_TENSORS = 1 << 16
MAX_KEYS = 1 << 16
MAX_KEY_BYTES = (1 << 16) - 1
MAX_TENSOR_NAME_BYTES = 64
MAX_DIMENSIONS = 4
MAX_STRINGS = 1 << 20  # in all arrays; the largest vocabularies in use have three quarters of it

_TYPE_BOOL, _TYPE_STRING, _TYPE_ARRAY = 7, 8, 9
_SCALAR_DTYPES: dict[int, np.dtype[np.number]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _TYPE_BOOL: np.dtype("u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}

NumericArray = npt.NDArray[np.number]
MetadataValue = bool | int | float | str | tuple[str, ...] | NumericArray


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """It is inside the file and overlaps no other."""

    name: str
    shape: tuple[int, ...]  # outermost dimension first; GGUF stores the reverse
    quantization: GGMLQuantizationType
    start: int  # byte offset from the beginning of the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Typed lookups raise ModelCorruptError naming the key."""

    path: Path
    metadata: Mapping[str, MetadataValue]
    tensors: Mapping[str, TensorInfo]

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.metadata.get(key, default)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        raise self._mistyped(key, "an integer")

    def number(self, key: str, default: float | None = None) -> float:
        value = self.metadata.get(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
        raise self._mistyped(key, "a finite number")

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self.metadata.get(key, default)
        if isinstance(value, bool):
            return value
        raise self._mistyped(key, "true or false")

    def text(self, key: str, default: str | None = None) -> str:
        value = self.metadata.get(key, default)
        if isinstance(value, str):
            return value
        raise self._mistyped(key, "a string")

    def strings(self, key: str) -> tuple[str, ...]:
        value = self.metadata.get(key)
        if isinstance(value, tuple):
            return value
        raise self._mistyped(key, "an array of strings")

    def numbers(self, key: str) -> NumericArray:
        """They are 1-d, of the dtype the file states."""
        value = self.metadata.get(key)
        if isinstance(value, np.ndarray):
            return value
        raise self._mistyped(key, "an array of numbers")

    def _mistyped(self, key: str, kind: str) -> Exception:
        state = "is not" if key in self.metadata else "is missing, which should be"
        return wrong(self.path, f"metadata key {key} {state} {kind}")


def read_gguf_header(path: Path) -> GgufHeader:
    """Raises ModelNotFoundError where the file cannot be read, ModelCorruptError where it is not a sound GGUF file, and
    UnsupportedModelError for versions, byte orders, value types and tensor types outside this reader's range.
    """
    try:
        with open_regular(path) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            return _HeaderReader(path, file, size_bytes).header()
    except OSError as error:
        raise unreadable(path, error) from error


class _HeaderReader:
    """`take` is the only place that reads, and it never reads past the bound."""

    def __init__(self, path: Path, file: BinaryIO, size_bytes: int) -> None:
        self._path = path
        self._file = file
        self._size_bytes = size_bytes
        self._end = min(size_bytes, MAX_HEADER_BYTES)
        self._position = 0
        self._num_strings = 0

    def header(self) -> GgufHeader:
        self._check_magic_and_version()
        num_tensors = self._count(MAX_TENSORS, "tensors")
        num_keys = self._count(MAX_KEYS, "metadata keys")
        metadata: dict[str, MetadataValue] = {}
        for _ in range(num_keys):
            key = self._text(MAX_KEY_BYTES)
            if key in metadata:
                raise wrong(self._path, f"metadata key {shown(key)} appears twice")
            metadata[key] = self._value(key)
        raw_infos = [self._tensor_info() for _ in range(num_tensors)]
        data_start = self._data_start(metadata)
        infos = [self._placed(info, data_start) for info in raw_infos]
        return GgufHeader(self._path, metadata, self._directory(infos))

    def _check_magic_and_version(self) -> None:
        if self._size_bytes < len(MAGIC) or self._take(len(MAGIC)) != MAGIC:
            raise damaged(self._path, "it does not start with the letters GGUF")
        version = self._u32()
        if version & 0xFFFF == 0:
            raise unsupported(self._path, "it is a big-endian GGUF file")
        if version not in VERSIONS:
            raise unsupported(self._path, f"it is GGUF version {version}, and versions 2 and 3 are read")

    def _take(self, num_bytes: int) -> bytes:
        if num_bytes > self._end - self._position:
            limit = "the file ends" if self._end == self._size_bytes else f"the header exceeds {MAX_HEADER_BYTES} bytes"
            raise damaged(self._path, f"{limit} where {num_bytes} bytes were announced at offset {self._position}")
        data = self._file.read(num_bytes)
        if len(data) != num_bytes:
            raise damaged(self._path, "it became shorter while it was read")
        self._position += num_bytes
        return data

    def _u32(self) -> int:
        return int.from_bytes(self._take(4), "little")

    def _u64(self) -> int:
        return int.from_bytes(self._take(8), "little")

    def _count(self, limit: int, what: str) -> int:
        count = self._u64()
        if count > limit:
            raise damaged(self._path, f"it announces {count} {what}, more than the {limit} allowed")
        return count

    def _text(self, max_bytes: int) -> str:
        num_bytes = self._u64()
        if num_bytes > max_bytes:
            raise damaged(self._path, f"a string of {num_bytes} bytes at offset {self._position} is too long")
        try:
            return self._take(num_bytes).decode("utf-8")
        except UnicodeDecodeError as error:
            raise damaged(self._path, f"a string before offset {self._position} is not UTF-8") from error

    def _value(self, key: str) -> MetadataValue:
        value_type = self._u32()
        if value_type == _TYPE_STRING:
            return self._text(MAX_HEADER_BYTES)
        if value_type == _TYPE_ARRAY:
            return self._array(key)
        value = self._numbers(key, value_type, 1)[0].item()
        return bool(value) if value_type == _TYPE_BOOL else value

    def _array(self, key: str) -> tuple[str, ...] | NumericArray:
        item_type, length = self._u32(), self._u64()
        if item_type == _TYPE_ARRAY:
            raise unsupported(self._path, f"metadata key {shown(key)} is an array of arrays")
        if item_type != _TYPE_STRING:
            return self._numbers(key, item_type, length)
        self._num_strings += length
        if self._num_strings > MAX_STRINGS:
            raise damaged(self._path, f"its metadata announces more than the {MAX_STRINGS} strings allowed")
        return tuple(self._text(MAX_HEADER_BYTES) for _ in range(length))

    def _numbers(self, key: str, value_type: int, length: int) -> NumericArray:
        dtype = _SCALAR_DTYPES.get(value_type)
        if dtype is None:
            raise damaged(self._path, f"metadata key {shown(key)} has the unknown type {value_type}")
        values: NumericArray = np.frombuffer(self._take(length * dtype.itemsize), dtype)
        if value_type == _TYPE_BOOL and np.any(values > 1):
            raise damaged(self._path, f"metadata key {shown(key)} holds a truth value other than 0 and 1")
        return values

    def _tensor_info(self) -> TensorInfo:
        """`start` is still relative to the data section, whose place is known only later."""
        name = self._text(MAX_TENSOR_NAME_BYTES)
        num_dimensions = self._u32()
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise damaged(self._path, f"tensor {shown(name)} has {num_dimensions} dimensions")
        shape = struct.unpack(f"<{num_dimensions}Q", self._take(8 * num_dimensions))[::-1]
        type_id, start = self._u32(), self._u64()
        try:
            quantization = GGMLQuantizationType(type_id)
        except ValueError as error:
            raise unsupported(self._path, f"tensor {shown(name)} has the unknown type {type_id}") from error
        return TensorInfo(name, shape, quantization, start, self._num_bytes(name, shape, quantization))

    def _num_bytes(self, name: str, shape: tuple[int, ...], quantization: GGMLQuantizationType) -> int:
        block_elements, block_bytes = GGML_QUANT_SIZES[quantization]
        if 0 in shape or shape[-1] % block_elements:
            raise damaged(self._path, f"tensor {shown(name)} has a shape {shape} that {quantization.name} cannot hold")
        # Python's integers do not overflow.
        num_bytes = math.prod(shape) // block_elements * block_bytes
        if num_bytes > self._size_bytes:
            raise damaged(self._path, f"tensor {shown(name)} of shape {shape} is larger than the file")
        return num_bytes

    def _data_start(self, metadata: Mapping[str, MetadataValue]) -> int:
        alignment = GgufHeader(self._path, metadata, {}).integer("general.alignment", DEFAULT_ALIGNMENT)
        if not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise wrong(self._path, f"general.alignment is {alignment}, not a power of two from 8 to {MAX_ALIGNMENT}")
        return -(-self._position // alignment) * alignment

    def _placed(self, info: TensorInfo, data_start: int) -> TensorInfo:
        start = data_start + info.start
        if start + info.num_bytes > self._size_bytes:
            raise damaged(self._path, f"the file ends before tensor {shown(info.name)} does; it may be cut short")
        return TensorInfo(info.name, info.shape, info.quantization, start, info.num_bytes)

    def _directory(self, infos: list[TensorInfo]) -> dict[str, TensorInfo]:
        directory = {info.name: info for info in infos}
        if len(directory) != len(infos):
            raise damaged(self._path, "two tensors have the same name")
        end = 0
        # Tensors that shared bytes would let a small file ask for any amount of memory.
        for info in sorted(infos, key=lambda info: info.start):
            if info.start < end:
                raise damaged(self._path, f"tensor {shown(info.name)} overlaps another")
            end = info.start + info.num_bytes
        return directory

"""Quantised matrices in the one form that all formats are read into; nothing is rounded on the way.

A code is a number, or the index of one in a table. Inputs that share a scale are a group, in each row by itself: scales
of blocks of rows, of whole rows or of the whole matrix are repeated. Refuses to know formats, and where kernels put the
numbers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from paceline_executor.weights.stored_tensor import (
    ByteArray,
    ByteSource,
    GroupedType,
    Stored,
    StoredIntegers,
    StoredTensor,
)

if TYPE_CHECKING:
    import torch

Float32Array = npt.NDArray[np.float32]
CodeArray = npt.NDArray[np.uint8] | npt.NDArray[np.int8]
IntArray = npt.NDArray[np.intp]
_NUMBERS_AT_ONCE = 16 << 20
_Integer = TypeVar("_Integer", np.uint8, np.int8)
_Codes = TypeVar("_Codes", npt.NDArray[np.uint8], "torch.Tensor")


@dataclass(frozen=True, slots=True)
class GroupedRows:
    """Weight = (number of the code - zero) * scale * factor, each product rounded to float32; or number * scale +
    minimum.
    """

    num_bits: int  # of a code: 4 or 8
    codes: CodeArray  # [rows, inputs]
    scales: Float32Array  # [rows, groups]
    group: int  # inputs of a group; the last one may have fewer
    zeros: Float32Array | None = None  # [rows, groups] whole numbers
    minima: Float32Array | None = None  # [rows, groups], of blocks of GGUF files, on a CPU
    table: Float32Array | None = None  # [16] or [256], the number of each code
    order: IntArray | None = None  # [inputs] the group of each; None where neighbours share one
    factor: float = 1.0  # of LLM.int8, which multiplies twice

    @property
    def group_of_input(self) -> IntArray:
        return np.arange(self.codes.shape[1]) // self.group if self.order is None else self.order

    def parts(self) -> Iterator[tuple[int, "GroupedRows"]]:
        """(first row, some rows): what is converted at a time."""
        rows = max(1, _NUMBERS_AT_ONCE // self.codes.shape[1])
        for first in range(0, len(self.codes), rows):
            yield first, self.of_rows(slice(first, first + rows))

    def floats(self) -> Float32Array:
        """[rows, inputs], newly made."""
        values = np.empty(self.codes.shape, np.float32)
        for first, part in self.parts():
            part.write_into(values[first : first + len(part.codes)])
        return values

    def write_into(self, values: Float32Array) -> None:
        values[...] = self.codes if self.table is None else self.table[self.codes]
        if self.zeros is not None:
            values -= self._spread(self.zeros)
        with np.errstate(all="ignore"):  # the caller looks at what came out
            values *= self._spread(self.scales)
        values *= np.float32(self.factor)
        if self.minima is not None:
            values += self._spread(self.minima)

    def _spread(self, numbers: Float32Array) -> Float32Array:
        """[rows, groups] -> [rows, inputs]; four times as fast where neighbours share a group."""
        if self.order is not None:
            return np.take(numbers, self.order, axis=1)
        num_inputs = self.codes.shape[1]
        return np.repeat(numbers, min(self.group, num_inputs), axis=1)[:, :num_inputs]

    def of_rows(self, rows: "IntArray | slice") -> "GroupedRows":
        zeros = None if self.zeros is None else self.zeros[rows]
        minima = None if self.minima is None else self.minima[rows]
        return replace(self, codes=self.codes[rows], scales=self.scales[rows], zeros=zeros, minima=minima)


@dataclass(frozen=True, slots=True)
class StoredCodes:
    """A matrix's codes as a file has them: rows of words, each of several codes, those in its lowest bits first."""

    part: Stored
    num_bits: int
    shape: tuple[int, int]  # [out, in]
    is_transposed: bool = False  # rows are of inputs, or of words of inputs
    outputs_of_word: tuple[int, ...] = ()  # the output of each of its codes; none where a word is of inputs
    high_first: bool = False  # of the two codes of a byte

    @property
    def is_signed(self) -> bool:
        return isinstance(self.part, StoredIntegers) and self.part.dtype == np.int8

    def read(self) -> CodeArray:
        """[out, in]. Raises ModelCorruptError."""
        words: npt.NDArray[Any]
        words = self.part.as_stored() if isinstance(self.part, StoredIntegers) else self.part.read()
        if self.is_signed:
            return words.view(np.int8)
        words = words.view(f"u{words.itemsize}")
        words = np.ascontiguousarray(words.T if self.is_transposed else words)
        if not self.outputs_of_word:
            octets = words.view(np.uint8)
            codes = octets if self.num_bits == 8 else nibbles(octets, high_first=self.high_first)
            return self.trimmed(codes)
        numbers = np.empty((words.shape[0], len(self.outputs_of_word), words.shape[1]), np.uint8)
        for place, output in enumerate(self.outputs_of_word):
            numbers[:, output] = words >> np.uint32(self.num_bits * place) & 15
        return numbers.reshape(self.shape)

    def trimmed(self, codes: _Codes) -> _Codes:
        """Without what fills the last word of each row up, or of all where rows lie side by side without."""
        outputs, inputs = self.shape
        if self.part.num_rows != outputs and not self.is_transposed:
            return codes.reshape(-1)[: outputs * inputs].reshape(outputs, inputs)
        return codes[:, :inputs]


def nibbles(octets: ByteArray, *, high_first: bool = False) -> ByteArray:
    numbers = np.empty((*octets.shape[:-1], 2 * octets.shape[-1]), np.uint8)
    numbers[..., int(high_first) :: 2] = octets & 15
    numbers[..., int(not high_first) :: 2] = octets >> 4
    return numbers


def _zeros(dtype: type[_Integer], shape: tuple[int, int]) -> npt.NDArray[_Integer]:
    return np.broadcast_to(np.zeros((), dtype), shape)


@dataclass(frozen=True, slots=True)
class GroupedTensor:
    """A matrix that several tensors of files make up. Whoever makes it has checked that they are there and fit."""

    codes: StoredCodes
    stored: GroupedType
    num_bytes: int  # of all its tensors
    scaled: Callable[[CodeArray], GroupedRows]  # reads all but the codes

    def read(self) -> GroupedRows:
        """Raises ModelCorruptError."""
        return self.scaled(self.codes.read())

    def read_scales(self) -> GroupedRows:
        """With codes that are 0, which take no memory. Raises ModelCorruptError."""
        return self.scaled(_zeros(np.int8, self.shape) if self.codes.is_signed else _zeros(np.uint8, self.shape))

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]"""
        return self.codes.shape

    @property
    def name(self) -> str:
        """Of the tensor with its codes."""
        return self.codes.part.name

    @property
    def source(self) -> ByteSource:
        return self.codes.part.source

    @property
    def num_rows(self) -> int:
        return self.shape[0]

    @property
    def row_numbers(self) -> int:
        return self.shape[1]


Matrix = StoredTensor | GroupedTensor

"""Quantised matrices in the one form that all formats are read into; nothing is rounded on the way.

A code is a number, or the index of one in a table. Inputs that share a scale are a group, in each row by itself: scales
of blocks of rows, of whole rows or of the whole matrix are repeated. Refuses to know formats, and where kernels put the
numbers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from paceline_executor.weights.stored_tensor import ByteSource, GroupedType, StoredIntegers, StoredTensor

Float32Array = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.intp]
_NUMBERS_AT_ONCE = 16 << 20


@dataclass(frozen=True, slots=True)
class GroupedRows:
    """Weight = (number of the code - zero) * scale * factor, each product rounded to float32; or number * scale +
    minimum.
    """

    num_bits: int  # of a code: 4 or 8
    codes: npt.NDArray[np.uint8] | npt.NDArray[np.int8]  # [rows, inputs]
    scales: Float32Array  # [rows, groups]
    group: int  # inputs of a group; the last one may have fewer
    zeros: Float32Array | None = None  # [rows, groups] whole numbers
    minima: Float32Array | None = None  # [rows, groups], of blocks of GGUF files
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
class GroupedTensor:
    """A matrix that several tensors of files make up. Whoever makes it has checked that they are there and fit."""

    codes: StoredTensor | StoredIntegers
    stored: GroupedType
    shape: tuple[int, int]  # [out, in]
    num_bytes: int  # of all its tensors
    read: Callable[[], GroupedRows]  # raises ModelCorruptError

    @property
    def name(self) -> str:
        """Of the tensor with its codes."""
        return self.codes.name

    @property
    def source(self) -> ByteSource:
        return self.codes.source

    @property
    def num_rows(self) -> int:
        return self.shape[0]

    @property
    def row_numbers(self) -> int:
        return self.shape[1]


Matrix = StoredTensor | GroupedTensor

"""Parts of stored matrices: some of its outputs, or some of its inputs, as a matrix of their own.

What is left out is not read where it lies in other rows of the file, and dropped at once where it lies in the same.
Refuses to know why a matrix is cut.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
from gguf.constants import GGMLQuantizationType

from paceline_executor.weights.grouped_rows import CodeArray, GroupedRows, GroupedTensor, Matrix, StoredCodes
from paceline_executor.weights.stored_tensor import (
    ByteSource,
    GroupedType,
    Stored,
    StoredIntegers,
    StoredTensor,
    StoredType,
    block_sizes,
)

_WORD_CODES = 8  # of 4 bits, of one output or one input; formats have no larger words
_Stored = TypeVar("_Stored", bound=Stored)


def can_cut_inputs(stored: StoredType | None, num_inputs: int) -> bool:
    """Whether parts of so many inputs each are whole groups, blocks and words."""
    if isinstance(stored, GroupedType):
        return not stored.is_ordered and num_inputs % max(stored.group, _WORD_CODES) == 0
    return not isinstance(stored, GGMLQuantizationType) or num_inputs % block_sizes(stored)[0] == 0


def can_cut_outputs(stored: StoredType | None, num_outputs: int) -> bool:
    return not isinstance(stored, GroupedType) or num_outputs % _WORD_CODES == 0


def cut(matrix: Matrix, outputs: slice, inputs: slice) -> Matrix:
    """Both have a beginning and an end, at which the matrix can be cut."""
    if isinstance(matrix, StoredTensor):
        scales = matrix.scales
        if scales is not None and scales.num_rows > 1:
            scales = _rows(scales, outputs)
        num_heads = matrix.interleaved_heads * (outputs.stop - outputs.start) // matrix.num_rows
        part = replace(_rows(matrix, outputs), scales=scales, interleaved_heads=num_heads)
        numbers, num_bytes = block_sizes(matrix.stored)
        return _columns(part, inputs, num_bytes / numbers)
    codes = _cut_codes(matrix.codes, outputs, inputs)

    def scaled(codes: CodeArray) -> GroupedRows:
        return _cut_groups(matrix.read_scales(), outputs, inputs, codes)

    num_bytes = matrix.num_bytes * codes.part.num_bytes // matrix.codes.part.num_bytes
    return GroupedTensor(codes, matrix.stored, num_bytes, scaled)


def of_expert(stacked: StoredTensor, expert: int, rows: slice) -> StoredTensor:
    """Rows of one matrix out of those of all experts: [num_experts, out, in]."""
    matrix = replace(stacked, shape=stacked.shape[1:], start=stacked.start + expert * stacked.row_bytes)
    return _rows(matrix, rows)


def _cut_groups(whole: GroupedRows, outputs: slice, inputs: slice, codes: CodeArray) -> GroupedRows:
    part = whole.of_rows(outputs)
    if inputs.stop - inputs.start == whole.codes.shape[1]:
        return replace(part, codes=codes)
    groups = slice(inputs.start // whole.group, -(-inputs.stop // whole.group))
    return replace(
        part,
        codes=codes,
        scales=part.scales[:, groups],
        zeros=None if part.zeros is None else part.zeros[:, groups],
        minima=None if part.minima is None else part.minima[:, groups],
    )


def _cut_codes(codes: StoredCodes, outputs: slice, inputs: slice) -> StoredCodes:
    part, (num_outputs, num_inputs) = codes.part, codes.shape
    item_bytes = part.dtype.itemsize if isinstance(part, StoredIntegers) else block_sizes(part.stored)[1]
    if part.num_rows != num_outputs and not codes.is_transposed:  # rows lie side by side
        part = replace(part, shape=(num_outputs, num_inputs * codes.num_bits // 8 // item_bytes))
    of_word = 8 * item_bytes // codes.num_bits
    words_of_outputs = _divided(outputs, len(codes.outputs_of_word) or 1)
    words_of_inputs = _divided(inputs, 1 if codes.outputs_of_word else of_word)
    rows, columns = words_of_outputs, words_of_inputs
    if codes.is_transposed:
        rows, columns = columns, rows
    shape = (outputs.stop - outputs.start, inputs.stop - inputs.start)
    return replace(codes, part=_columns(_rows(part, rows), columns, item_bytes), shape=shape)


def _divided(numbers: slice, by: int) -> slice:
    return slice(numbers.start // by, -(-numbers.stop // by))


def _rows(stored: _Stored, rows: slice) -> _Stored:
    shape = (rows.stop - rows.start, *stored.shape[1:])
    return replace(stored, shape=shape, start=stored.start + rows.start * stored.row_bytes)


def _columns(stored: _Stored, columns: slice, column_bytes: float) -> _Stored:
    """column_bytes: of a number, which may be less than one; the columns together have whole ones."""
    if stored.shape[1:] in ((), (columns.stop - columns.start,)):
        return stored
    first, end = int(columns.start * column_bytes), int(columns.stop * column_bytes)
    source = _PieceBytes(stored.source, stored.start + first, stored.row_bytes, end - first)
    return replace(stored, shape=(stored.shape[0], columns.stop - columns.start), source=source, start=0)


@dataclass(frozen=True, slots=True)
class _PieceBytes:
    """See ByteSource: one piece of each row, side by side."""

    source: ByteSource
    start: int  # of the first row's
    row_bytes: int
    piece_bytes: int

    @property
    def path(self) -> Path:
        return self.source.path

    def read_into(self, buffer: memoryview, start: int) -> None:
        first, end = start // self.piece_bytes, -(-(start + buffer.nbytes) // self.piece_bytes)
        rows = np.empty((end - first, self.row_bytes), np.uint8)
        num_bytes = rows.size - self.row_bytes + self.piece_bytes  # the file may end with the last piece
        self.source.read_into(rows.reshape(-1)[:num_bytes].data, self.start + first * self.row_bytes)
        pieces = rows[:, : self.piece_bytes].reshape(-1)[start - first * self.piece_bytes :]
        np.frombuffer(buffer, np.uint8)[:] = pieces[: buffer.nbytes]

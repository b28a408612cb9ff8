"""How quantised weights lie in memory: sixteen outputs side by side, group after group, so that a product streams them.

Knows numpy arrays and the formats. What quantised them is the caller's affair; only `quantize` does so itself, for
weights that come as floats.

A tile is 16 outputs with all their inputs; the last tile of a matrix is filled up with zeros. A group is 32 inputs, for
which activations have a scale. A span is one or more groups for which weights have one; the last may be shorter. Bytes
of a span: 16 scales, float16; of 4 bits also 16 minima or zero points; then its groups, of 8 quads of four inputs
each:
  int4: 32 bytes, byte 4 c + i holding input i of output c in its low half and of output 8 + c in its high one.
        Weight = scale * integer + minimum, or scale * (integer - zero), integers 0 to 15.
  int8: 64 bytes, byte 4 c + i holding input i of output c. Weight = scale * integer.
"""

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from paceline_kernels.errors import KernelArgumentError

GROUP = 32  # inputs
TILE = 16  # outputs side by side
WHOLE_ROW = 1 << 20  # a span that no matrix fills
INT4_QUADS, INT8_QUADS = GROUP * TILE // 2, GROUP * TILE  # bytes of a group
INT4_COLUMNS, INT8_COLUMNS = 4 * TILE, 2 * TILE  # bytes of a span beside them

KIND_BITS = 2
_ROWS_AT_ONCE = 1024  # what is made of them on the way takes several times their memory
_MAX_INT8 = 127
# A group all below this has no scale that float16 could hold: it becomes zeros.
_SMALLEST_SCALE = np.float32(2.0**-24)


class WeightFormat(enum.IntEnum):
    """How the weights of a matrix are stored; the numbers are what compiled code is told."""

    INT4 = 0  # with minima
    INT8 = 1
    INT4_ZEROS = 2


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A matrix [num_outputs, num_inputs] as the products want it."""

    data: torch.Tensor  # [num_tiles, bytes of a tile] uint8
    format: WeightFormat
    num_outputs: int
    num_inputs: int  # a multiple of 32
    span: int = 1  # groups under one scale: a power of two

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes

    @property
    def code(self) -> int:
        """Format and span in one number, for compiled code."""
        return int(self.format) | (self.span.bit_length() - 1) << KIND_BITS


def pack_int4(
    integers: npt.NDArray[np.uint8],
    scales: npt.NDArray[np.float32],
    minima: npt.NDArray[np.float32] | None = None,
    zeros: npt.NDArray[np.float32] | None = None,
    span: int = 1,
) -> PackedWeight:
    """Pack integers [outputs, inputs] of 0 to 15 with scales, and minima or zeros, [outputs, spans], kept as float16.

    Raises KernelArgumentError for shapes that do not fit and for scales beyond float16.
    """
    weight_format, second = (WeightFormat.INT4, minima) if zeros is None else (WeightFormat.INT4_ZEROS, zeros)
    if second is None or second.shape != scales.shape:
        given = "no" if second is None else list(second.shape)
        raise KernelArgumentError("pack", f"{given} zeros or minima do not fit {list(scales.shape)} scales")
    quads = _quads(integers, scales, span)  # [tiles, halves, 8, groups, quads, 4]
    nibbles = quads.transpose(1, 0, 3, 4, 2, 5)  # [halves, tiles, groups, quads, 8, 4]
    packed = nibbles[0] | (nibbles[1] << 4)
    groups = packed.reshape(*packed.shape[:2], -1)
    columns = np.concatenate((_half_columns(scales), _half_columns(second)), axis=2)
    return _packed(columns, groups, weight_format, integers.shape, span)


def pack_int8(integers: npt.NDArray[np.int8], scales: npt.NDArray[np.float32], span: int = 1) -> PackedWeight:
    """Pack integers [outputs, inputs] with scales [outputs, spans], kept as float16.

    Raises KernelArgumentError for shapes that do not fit and for scales beyond float16.
    """
    quads = _quads(integers, scales, span).transpose(0, 3, 4, 1, 2, 5)  # [tiles, groups, quads, halves, 8, 4]
    groups = quads.reshape(*quads.shape[:2], -1).view(np.uint8)
    return _packed(_half_columns(scales), groups, WeightFormat.INT8, integers.shape, span)


def quantize(weight: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Integers [outputs, inputs] and scales [outputs, inputs / 32] of a float matrix, each group by its own largest.

    A weight is off by at most half a scale, 1/254 of the largest of its group. Raises KernelArgumentError.
    """
    integers = np.empty(weight.shape, dtype=np.int8)
    scales = np.empty((weight.shape[0], weight.shape[1] // GROUP), dtype=np.float32)
    for start in range(0, weight.shape[0], _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        integers[rows], scales[rows] = _quantize(weight[rows])
    return integers, scales


def _quantize(weight: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    groups = weight.reshape(weight.shape[0], -1, GROUP)
    # The scale is rounded to float16 first, up, so that no integer exceeds 127.
    wanted = np.abs(groups).max(axis=2) / np.float32(_MAX_INT8)
    nearest = _half(wanted)
    with np.errstate(over="ignore"):
        above = np.where(nearest < wanted, np.nextafter(nearest, np.float16(np.inf)), nearest)
    scales = _half(above.astype(np.float32)).astype(np.float32)
    scales[wanted < _SMALLEST_SCALE] = 0
    safe = np.where(scales > 0, scales, np.float32(1))
    integers = np.rint(groups / safe[:, :, None]).clip(-_MAX_INT8, _MAX_INT8) * (scales > 0)[:, :, None]
    return integers.astype(np.int8).reshape(weight.shape), scales


def _quads(integers: npt.NDArray[np.generic], scales: npt.NDArray[np.float32], span: int) -> npt.NDArray[np.generic]:
    """[tiles, halves, 8, groups, quads, 4], outputs filled up with zeros."""
    num_outputs, num_inputs = integers.shape
    if span.bit_count() != 1:
        raise KernelArgumentError("pack", f"a span must be a power of two, not {span}")
    if num_inputs % GROUP or scales.shape != (num_outputs, -(-num_inputs // (GROUP * span))):
        raise KernelArgumentError("pack", f"{list(integers.shape)} weights do not fit {list(scales.shape)} scales")
    filled = np.pad(integers, ((0, -num_outputs % TILE), (0, 0)))
    return filled.reshape(-1, 2, TILE // 2, num_inputs // GROUP, GROUP // 4, 4)


def _half(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float16]:
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    if not np.isfinite(halves).all():
        raise KernelArgumentError("pack", "a scale is not a finite float16")
    return halves


def _half_columns(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """[tiles, spans, 32 bytes]: sixteen float16 side by side."""
    filled = np.pad(_half(values), ((0, -values.shape[0] % TILE), (0, 0)))
    return np.ascontiguousarray(filled.reshape(-1, TILE, values.shape[1]).transpose(0, 2, 1)).view(np.uint8)


def _packed(
    columns: npt.NDArray[np.uint8],
    groups: npt.NDArray[np.uint8],
    weight_format: WeightFormat,
    shape: tuple[int, int],
    span: int,
) -> PackedWeight:
    """columns: [tiles, spans, bytes]; groups: [tiles, groups, bytes]."""
    num_tiles, num_groups = groups.shape[:2]
    if span == 1:
        data = np.concatenate((columns, groups), axis=2).reshape(num_tiles, -1)
    else:
        starts = range(0, num_groups, span)
        parts = ((columns[:, i], groups[:, at : at + span].reshape(num_tiles, -1)) for i, at in enumerate(starts))
        data = np.concatenate([part for of_span in parts for part in of_span], axis=1)
    return PackedWeight(torch.from_numpy(np.ascontiguousarray(data)), weight_format, *shape, span)

"""What one worker of attention works with: its memory for a tile of query rows, and where the blocks of a cache lie.

Knows addresses inside the caches; block ids are checked before compiled code sees them. It refuses to know what is
computed.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline_kernels.compiler import jit
from paceline_kernels.vector import simd

_Float32Array = npt.NDArray[np.float32]
_Int16Array = npt.NDArray[np.int16]
_Int32Array = npt.NDArray[np.int32]
_Int64Array = npt.NDArray[np.int64]
# Keys or values: float32, uint16 for the bits of float16, or int8 as `int8` has them.
Cache = npt.NDArray[Any]


class Scratch(NamedTuple):
    """One worker's memory. `rows` are the query rows of a tile: token by token, the heads of the group of each."""

    queries: _Float32Array  # [rows, head_dim], scaled
    scores: _Float32Array  # [rows, positions of a segment]
    num_rows: _Int64Array  # [1] how many rows of the tile in hand come before the first that is past the segment
    hidden: _Int64Array  # [rows] how many positions of the segment lie before the row's window
    visible: _Int64Array  # [rows] where the row stops to see positions of the segment; neither falls from row to row
    max: _Float32Array  # [rows] of the segment: the largest score,
    sum: _Float32Array  # [rows] the sum of the scores' exponentials,
    sums: _Float32Array  # [rows, head_dim] the values weighted by them
    total_max: _Float32Array  # the same three of all segments so far
    total_sum: _Float32Array
    total: _Float32Array
    ones: _Float32Array  # [positions of a segment]
    # For int8 keys and values:
    words: _Int16Array  # [rows, head_dim] the queries
    word_scales: _Float32Array  # [rows] their scales, and that of q · k
    scales: _Float32Array  # [positions of a segment] of the values
    weights: _Int16Array  # [rows, positions of a segment]
    weight_scales: _Float32Array  # [rows]


@jit.compiled
def new_scratch(rows: int, head_dim: int, width: int) -> Scratch:
    """Memory for one worker."""
    return Scratch(
        np.empty((rows, head_dim), dtype=np.float32),
        np.empty((rows, width), dtype=np.float32),
        np.zeros(1, dtype=np.int64),
        np.empty(rows, dtype=np.int64),
        np.empty(rows, dtype=np.int64),
        np.empty(rows, dtype=np.float32),
        np.empty(rows, dtype=np.float32),
        np.empty((rows, head_dim), dtype=np.float32),
        np.empty(rows, dtype=np.float32),
        np.empty(rows, dtype=np.float32),
        np.empty((rows, head_dim), dtype=np.float32),
        np.ones(width, dtype=np.float32),
        np.empty((rows, head_dim), dtype=np.int16),
        np.empty(rows, dtype=np.float32),
        np.empty(width, dtype=np.float32),
        np.empty((rows, width), dtype=np.int16),
        np.empty(rows, dtype=np.float32),
    )


@jit.compiled
def block_address(cache: Cache, block: int, head: int) -> int:
    """Where a head's slots of a block begin. (A slice of the array would be counted in and out, once per block.)"""
    slots = (block * cache.shape[1] + head) * cache.shape[2]
    return simd.address(cache) + int(slots * cache.shape[3] * cache.itemsize)

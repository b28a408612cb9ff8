"""How attention is cut into units of work.

A unit is a tile of tokens of one row and one KV head, whose query heads are done together,
so that a key or value fetched once serves them all. A row of one token (a decode) with several segments has one unit
per segment, because its few heads alone would not keep the threads busy; its segments are folded afterwards.
Units are dealt out to the workers in turn, which evens out that later tiles of a chunk see more positions.

Knows lengths and positions; not keys, nor what is done in a unit.
"""

import numpy as np
import numpy.typing as npt

from paceline_kernels.compiler import jit

_Int32Array = npt.NDArray[np.int32]
_Int64Array = npt.NDArray[np.int64]

_MAX_SEGMENT_POSITIONS = 256
# Query rows (tokens times the heads of a group) in a tile: their scores of a segment take 48 KiB.
_TILE_ROWS = 48

# The columns of the unit table: a tile of tokens of one row, and the segments of it to do. A split unit leaves its one
# segment as a partial result; a whole one does all segments and writes the output.
ROW, TOKEN, NUM_TOKENS, SEGMENT, END_SEGMENT, IS_SPLIT, PARTIAL = range(7)


@jit.compiled_for_python
def segment_positions(block_size: int) -> int:
    """How many positions a segment has: whole blocks."""
    return max(1, _MAX_SEGMENT_POSITIONS // block_size) * block_size


@jit.compiled_for_python
def tile_tokens(group: int) -> int:
    """How many tokens a tile has, for so many query heads on one KV head."""
    return max(1, _TILE_ROWS // group)


@jit.compiled
def num_segments(context_len: int, width: int) -> int:
    """How many segments cover this many positions."""
    return (context_len + width - 1) // width


@jit.compiled
def first_segment(position: int, window: int, width: int) -> int:
    """The first segment that a token at this position sees something of."""
    return max(0, position + 1 - window) // width


@jit.compiled_for_python
def count_units(
    cu_seqlens: _Int32Array, context_lens: _Int32Array, tokens_per_tile: int, width: int
) -> tuple[int, int]:
    """How many units there are, and how many of them are split."""
    num_units, num_partials = 0, 0
    for row in range(context_lens.shape[0]):
        length = cu_seqlens[row + 1] - cu_seqlens[row]
        segments = num_segments(context_lens[row], width)
        if length == 1 and segments > 1:
            num_partials += segments
        else:
            num_units += (length + tokens_per_tile - 1) // tokens_per_tile
    return num_units + num_partials, num_partials


@jit.compiled_for_python
def fill_units(
    cu_seqlens: _Int32Array,
    context_lens: _Int32Array,
    tokens_per_tile: int,
    width: int,
    units: _Int64Array,
    first_partial: _Int64Array,
) -> None:
    """Write the unit table, and where each row's partial results begin; the results of row i end where i + 1 begins."""
    unit, partial = 0, 0
    for row in range(context_lens.shape[0]):
        start, stop = cu_seqlens[row], cu_seqlens[row + 1]
        segments = num_segments(context_lens[row], width)
        first_partial[row] = partial
        if stop - start == 1 and segments > 1:
            for segment in range(segments):
                units[unit, ROW], units[unit, TOKEN], units[unit, NUM_TOKENS] = row, start, 1
                units[unit, SEGMENT], units[unit, END_SEGMENT] = segment, segment + 1
                units[unit, IS_SPLIT], units[unit, PARTIAL] = 1, partial
                unit += 1
                partial += 1
        else:
            for token in range(start, stop, tokens_per_tile):
                tokens = min(tokens_per_tile, stop - token)
                seen = context_lens[row] - (stop - token - tokens)
                units[unit, ROW], units[unit, TOKEN], units[unit, NUM_TOKENS] = row, token, tokens
                units[unit, SEGMENT], units[unit, END_SEGMENT] = 0, num_segments(seen, width)
                units[unit, IS_SPLIT], units[unit, PARTIAL] = 0, 0
                unit += 1
    first_partial[context_lens.shape[0]] = partial

"""Attention over int8 keys and values, in exact integers: how the bytes of a block lie, what a segment makes of them.

A KV head's block holds its bytes in pairs, then a float32 scale for each slot. Of keys the two bytes of a pair are two
dimensions of one slot, of values two slots' bytes of one dimension, so that `int8_tiles` finds its inputs side by side:

    keys    [head_dim / 2] [block_size] [2]
    values  [block_size / 2] [head_dim] [2]

A query is rounded to 16 bits under one scale. In a segment a slot's weight is e to the (score - largest), times the
slot's scale, and the weights of a token are rounded to 16 bits under one scale. All sums of products are integers:
however rows are put together, they have the same bits.

Knows blocks and segments; not how a unit is put together from them, nor instructions.
"""

import numpy as np
import numpy.typing as npt

from paceline_kernels.attention import int8_tiles as tiles
from paceline_kernels.attention.scratch import Cache, Scratch, block_address
from paceline_kernels.compiler import jit
from paceline_kernels.quantized_linear.cpu import quantize_span
from paceline_kernels.vector import simd
from paceline_kernels.vector.integers import largest_magnitude

_Float32Array = npt.NDArray[np.float32]
_Int32Array = npt.NDArray[np.int32]

# What keeps sums of products below 2**31: 32,767 * 128 * 512. Segments are shorter, or one block.
_MAX_HEAD_DIM, _MAX_BLOCK_SIZE = 512, 256
_WORD_BYTES, _ID_BYTES = 2, 4
_MAX_WORD = np.float32(32767.0)
_ZERO = np.float32(0.0)
_INFINITY = np.float32(np.inf)
# Below this the factor would not be finite: such numbers count as zeros.
_SMALLEST = np.float32(1e-30)


def is_supported(block_size: int, head_dim: int) -> bool:
    """Whether keys and values may be kept in int8: tiles are whole, and no sum leaves 32 bits."""
    is_whole = block_size % tiles.STEP == 0 and head_dim % tiles.STEP == 0
    return is_whole and block_size <= _MAX_BLOCK_SIZE and head_dim <= _MAX_HEAD_DIM


@jit.compiled
def store_key(key: _Float32Array, cache: Cache, block: int, head: int, slot: int) -> None:
    """Round a key and put it into its slot; what it was is lost."""
    block_size, head_dim, source = cache.shape[2], key.shape[0], simd.address(key)
    scale, _ = quantize_span(source, head_dim, source)  # in place: a byte lies nowhere behind the float it is made of
    integers, stored = key.view(np.int8), cache[block, head].reshape(-1)
    for dimension in range(head_dim):
        stored[2 * (dimension // 2 * block_size + slot) + dimension % 2] = integers[dimension]
    simd.put(simd.address(stored) + block_size * head_dim, slot, scale)


@jit.compiled
def store_value(value: _Float32Array, cache: Cache, block: int, head: int, slot: int) -> None:
    """The same for a value."""
    block_size, head_dim, source = cache.shape[2], value.shape[0], simd.address(value)
    scale, _ = quantize_span(source, head_dim, source)
    integers, stored = value.view(np.int8), cache[block, head].reshape(-1)
    for dimension in range(head_dim):
        stored[2 * (slot // 2 * head_dim + dimension) + slot % 2] = integers[dimension]
    simd.put(simd.address(stored) + block_size * head_dim, slot, scale)


@jit.compiled
def _round(x: int, count: int, largest: jit.Float32, out: int) -> jit.Float32:
    """Make `count` floats, the largest of which is given, int16 under one scale, which is returned."""
    if largest < _SMALLEST:
        tiles.round_to_words(x, count, _ZERO, out)
        return _ZERO
    tiles.round_to_words(x, count, _MAX_WORD / largest, out)
    return largest / _MAX_WORD


@jit.compiled
def take_queries(
    query: _Float32Array, token_stride: int, num_tokens: int, group: int, scale: jit.Float32, scratch: Scratch
) -> None:
    """Round `group` heads of every token; `query` begins at the first of them. `scale` is that of q · k."""
    head_dim = scratch.words.shape[1]
    for token in range(num_tokens):
        for i in range(group):
            x = simd.address(query) + simd.FLOAT_BYTES * int(token * token_stride + i * head_dim)
            row = token * group + i
            largest = largest_magnitude(x, head_dim)
            words = simd.address(scratch.words) + _WORD_BYTES * row * head_dim
            scratch.word_scales[row] = scale * _round(x, head_dim, largest, words)


@jit.compiled
def _blocks(block_size: int, first_row: int, scratch: Scratch) -> tuple[int, int]:
    """Which of the segment's blocks rows from `first_row` on see anything of: from the first to before the second."""
    return scratch.hidden[first_row] // block_size, (scratch.visible[scratch.num_rows[0] - 1] - 1) // block_size + 1


@jit.compiled
def _rows_at_once(num_rows: int) -> int:
    """How many of the rows that are left the next tile has."""
    return 6 if num_rows >= 6 else min(num_rows, 3)


@jit.compiled
def _fetch(cache: Cache, head: int, block: int) -> None:
    """Ask for a block: no processor foresees where it lies."""
    simd.prefetch(block_address(cache, block, head), cache.shape[2] * cache.shape[3])


@jit.compiled
def _fetch_ahead(keys: Cache, values: Cache, head: int, table: _Int32Array, slot: int, end: int) -> None:
    """At the first slot of a block ask for its values, and for the keys of the next but one, of those before `end`."""
    block_size = keys.shape[2]
    if slot % block_size == 0:
        index = slot // block_size
        _fetch(values, head, table[index])
        _fetch(keys, head, table[min(index + 2, end - 1)])


@jit.compiled
def score(keys: Cache, values: Cache, head: int, table: _Int32Array, first_row: int, scratch: Scratch) -> None:
    """scores[rows] = queries · keys, scaled, of all slots in the blocks that a row sees; asks for their values, too."""
    block_size, head_dim, width = keys.shape[2], scratch.words.shape[1], scratch.scores.shape[1]
    words, scores = simd.address(scratch.words), simd.address(scratch.scores)
    word_scales, num_rows = simd.address(scratch.word_scales), scratch.num_rows[0]
    first, end = _blocks(block_size, first_row, scratch)
    _fetch(keys, head, table[first])
    _fetch(keys, head, table[min(first + 1, end - 1)])
    for slot in range(first * block_size, end * block_size, 2 * tiles.WIDTH):
        # Where a vector is left alone, it goes twice.
        other = min(slot + tiles.WIDTH, end * block_size - tiles.WIDTH)
        _fetch_ahead(keys, values, head, table, slot, end)
        _fetch_ahead(keys, values, head, table, other, end)
        pairs, scales = _place(keys, head, table, slot)
        other_pairs, other_scales = _place(keys, head, table, other)
        row = first_row
        while row < num_rows:
            rows = _rows_at_once(num_rows - row)
            x, of_rows = words + _WORD_BYTES * row * head_dim, word_scales + simd.FLOAT_BYTES * row
            out = scores + simd.FLOAT_BYTES * row * width
            inputs = (x, head_dim, head_dim // 2, 2 * block_size, of_rows, width)
            vector = (pairs, scales, out + simd.FLOAT_BYTES * slot)
            other_vector = (other_pairs, other_scales, out + simd.FLOAT_BYTES * other)
            if rows == 6:
                tiles.score_x6(*inputs, *vector, *other_vector)
            elif rows == 3:
                tiles.score_x3(*inputs, *vector, *other_vector)
            elif rows == 2:
                tiles.score_x2(*inputs, *vector, *other_vector)
            else:
                tiles.score_x1(*inputs, *vector, *other_vector)
            row += rows


@jit.compiled
def _place(keys: Cache, head: int, table: _Int32Array, slot: int) -> tuple[int, int]:
    """Where the pairs of a slot of the segment and its scale lie."""
    block_size, head_dim = keys.shape[2], keys.shape[3] - simd.FLOAT_BYTES
    start, within = block_address(keys, table[slot // block_size], head), slot % block_size
    return start + 2 * within, start + block_size * head_dim + simd.FLOAT_BYTES * within


@jit.compiled
def softmax(values: Cache, head: int, table: _Int32Array, first_row: int, scratch: Scratch) -> None:
    """Maximum, sum and rounded weights of every row; the weights of slots that a row does not see are zero."""
    block_size, head_dim, num_rows = values.shape[2], scratch.words.shape[1], scratch.num_rows[0]
    width, blocks = scratch.scores.shape[1], _blocks(block_size, first_row, scratch)
    first, end = blocks[0] * block_size, blocks[1] * block_size
    scales, scores = simd.address(scratch.scales), simd.address(scratch.scores) + simd.FLOAT_BYTES * first
    for index in range(*blocks):
        of_block = block_address(values, table[index], head) + block_size * head_dim
        tiles.copy(of_block, block_size, scales + simd.FLOAT_BYTES * index * block_size)
    # Loop by loop, because nothing of a row can begin before all of what is before it is done.
    for row in range(first_row, num_rows):
        for i in range(first, scratch.hidden[row]):
            scratch.scores[row, i] = -_INFINITY
        for i in range(scratch.visible[row], end):
            scratch.scores[row, i] = -_INFINITY
        scratch.max[row] = simd.maximum(scores + simd.FLOAT_BYTES * row * width, end - first)
    for row in range(first_row, num_rows):
        at, of_slots = scores + simd.FLOAT_BYTES * row * width, scales + simd.FLOAT_BYTES * first
        scratch.sum[row], scratch.weight_scales[row] = tiles.weigh(at, end - first, scratch.max[row], of_slots)
    # So far it is the largest weight that stands where the scale belongs.
    for row in range(first_row, num_rows):
        at = scores + simd.FLOAT_BYTES * row * width
        words = simd.address(scratch.weights) + _WORD_BYTES * (row * width + first)
        scratch.weight_scales[row] = _round(at, end - first, scratch.weight_scales[row], words)


@jit.compiled
def add_values(values: Cache, head: int, table: _Int32Array, first_row: int, scratch: Scratch) -> None:
    """sums[rows] = weights · values."""
    block_size, head_dim, width = values.shape[2], scratch.words.shape[1], scratch.weights.shape[1]
    weights, sums = simd.address(scratch.weights), simd.address(scratch.sums)
    weight_scales, num_rows = simd.address(scratch.weight_scales), scratch.num_rows[0]
    first, end = _blocks(block_size, first_row, scratch)
    blocks = simd.address(table) + _ID_BYTES * first
    block_0 = block_address(values, 0, head)
    block_bytes = block_address(values, 1, head) - block_0
    row = first_row
    while row < num_rows:
        rows = _rows_at_once(num_rows - row)
        x, scales = weights + _WORD_BYTES * (row * width + first * block_size), weight_scales + simd.FLOAT_BYTES * row
        for dimension in range(0, head_dim, 2 * tiles.WIDTH):
            apart = min(tiles.WIDTH, head_dim - tiles.WIDTH - dimension)  # a vector that is left alone goes twice
            out = sums + simd.FLOAT_BYTES * (row * head_dim + dimension)
            at = (blocks, end - first, block_0 + 2 * dimension, block_bytes)
            inputs = (x, width, *at, block_size // 2, 2 * head_dim, scales, out, head_dim, apart)
            if rows == 6:
                tiles.value_x6(*inputs)
            elif rows == 3:
                tiles.value_x3(*inputs)
            elif rows == 2:
                tiles.value_x2(*inputs)
            else:
                tiles.value_x1(*inputs)
        row += rows

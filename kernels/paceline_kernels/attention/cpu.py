"""attention for CPUs, in place over the blocks, with one order of reduction whatever the batch looks like.

Positions are cut into segments of 256 (fewer where the block size does not divide that), counted from position 0. In a
segment a token's scores are taken against their own maximum, summed in the order of `simd.dot`, and its values are
added in ascending position. Segments are folded into the result one after the other, the first to the last. Nothing
else enters a token's arithmetic, so the same token computed in a chunk of 1, 7 or 512 has the same bits. A window
leaves out what lies before it: segments wholly, and in the first segment it reaches into, the positions before it.

Knows addresses inside the caches; block ids are checked before compiled code sees them.
"""

from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
import torch

from paceline_kernels.attention import int8
from paceline_kernels.attention.scratch import Cache as Cache
from paceline_kernels.attention.scratch import Scratch as Scratch
from paceline_kernels.attention.scratch import block_address
from paceline_kernels.attention.scratch import new_scratch as new_scratch
from paceline_kernels.attention.units import (
    END_SEGMENT,
    IS_SPLIT,
    NUM_TOKENS,
    PARTIAL,
    ROW,
    SEGMENT,
    TOKEN,
    count_units,
    fill_units,
    first_segment,
    segment_positions,
    tile_tokens,
)
from paceline_kernels.compiler import jit
from paceline_kernels.errors import KernelArgumentError
from paceline_kernels.vector import simd
from paceline_kernels.vector.elementary import exp, exp_of_negative, tanh

_Float32Array = npt.NDArray[np.float32]
_Int32Array = npt.NDArray[np.int32]
_Int64Array = npt.NDArray[np.int64]
# The window of a token that sees all positions: more than any context has.
ALL_POSITIONS = 2**62


class Scoring(NamedTuple):
    """How scores come about, and which positions have one."""

    scale: Any  # float32, of q . k
    softcap: Any  # float32, above 0: scores become softcap * tanh(score / softcap); 0: they stay as they are
    window: int  # how many positions a token sees, its own included


class Partials(NamedTuple):
    """What split units leave: `max`, `sum` and `sums` of their segment, as in `Scratch`."""

    max: _Float32Array  # [num_partials, num_heads]
    sum: _Float32Array  # [num_partials, num_heads]
    sums: _Float32Array  # [num_partials, num_heads, head_dim]


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    num_tokens, num_heads, head_dim = query.shape
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=torch.float32)
    tables, starts, lens = block_tables.numpy(), cu_seqlens.numpy(), context_lens.numpy()
    check_rows(num_tokens, key_cache, tables, starts, lens, is_padded=True)
    keys, values, workers = key_cache.numpy(), value_cache.numpy(), jit.num_threads()
    # Flat, so that compiled code sees one type of array: numpy calls a strided query of one token contiguous.
    token_stride = query.stride(0)
    flat_size = (num_tokens - 1) * token_stride + num_heads * head_dim if num_tokens else 0
    flat = query.as_strided((flat_size,), (1,)).numpy()
    attend(
        flat, token_stride, keys, values, tables, starts, lens, scoring(scale, window, softcap), out.numpy(), workers
    )
    return out


def scoring(scale: float, window: int | None, softcap: float | None) -> Scoring:
    """As compiled code takes it; None is no window, and no cap."""
    return Scoring(np.float32(scale), np.float32(softcap or 0.0), ALL_POSITIONS if window is None else window)


def check_rows(
    num_tokens: int,
    key_cache: torch.Tensor,
    block_tables: _Int32Array,
    cu_seqlens: _Int32Array,
    context_lens: _Int32Array,
    *,
    is_padded: bool,
) -> None:
    """Refuse rows of impossible lengths, and blocks that do not exist.

    is_padded: rows may have no tokens, whatever else they have, and there may be tokens behind those of the last row.
    """
    num_blocks, _, block_size, _ = key_cache.shape
    row = count_sound_rows(num_blocks, block_size, block_tables, cu_seqlens, context_lens, 0 if is_padded else 1)
    if row < context_lens.shape[0]:
        raise KernelArgumentError("paged_attention", f"row {row} has inconsistent lengths or a block out of range")
    if cu_seqlens[0] != 0 or cu_seqlens[-1] > num_tokens or (cu_seqlens[-1] < num_tokens and not is_padded):
        raise KernelArgumentError("paged_attention", f"cu_seqlens must run from 0 to {num_tokens}")


@jit.compiled_for_python
def count_sound_rows(
    num_blocks: int,
    block_size: int,
    block_tables: _Int32Array,
    cu_seqlens: _Int32Array,
    context_lens: _Int32Array,
    min_tokens: int,
) -> int:
    """How many rows from the first on have possible lengths and only blocks that exist; one of no tokens needs none."""
    for row in range(context_lens.shape[0]):
        length = cu_seqlens[row + 1] - cu_seqlens[row]
        used = (context_lens[row] + block_size - 1) // block_size
        if length < min_tokens:
            return row
        if length == 0:
            continue
        if length > context_lens[row] or used > block_tables.shape[1]:
            return row
        for block in block_tables[row, :used]:
            if block < 0 or block >= num_blocks:
                return row
    return len(context_lens)


@jit.compiled
def _take_queries(
    query: _Float32Array, token_stride: int, num_tokens: int, group: int, scale: jit.Float32, queries: _Float32Array
) -> None:
    """Copy `group` heads of every token, scaled; `query` begins at the first of them."""
    head_dim = queries.shape[1]
    for token in range(num_tokens):
        for i in range(group):
            for d in range(head_dim):
                queries[token * group + i, d] = query[token * token_stride + i * head_dim + d] * scale


@jit.compiled
def _fetch_block(cache: Cache, head: int, table: _Int32Array, begin: int, count: int) -> None:
    """Ask for the block of position `begin`, if it is one of the first `count`: no processor foresees where it lies."""
    block_size = cache.shape[2]
    if begin < count:
        size = block_size * cache.shape[3] * cache.itemsize
        simd.prefetch(block_address(cache, table[begin // block_size], head), size)


@jit.compiled
def _first_block(first_row: int, block_size: int, scratch: Scratch) -> int:
    """The position in the segment at which the first block begins that rows from `first_row` on see anything of."""
    return int(scratch.hidden[first_row] // block_size * block_size)


@jit.compiled
def _score(keys: Cache, head: int, table: _Int32Array, first_row: int, scratch: Scratch) -> None:
    """scores[rows] = queries · keys; `table` holds the blocks of the segment."""
    head_dim, width = scratch.queries.shape[1], scratch.scores.shape[1]
    block_size, stride = keys.shape[2], keys.shape[3]
    num_rows = scratch.num_rows[0] - first_row
    count = scratch.visible[scratch.num_rows[0] - 1]
    queries = simd.address(scratch.queries) + simd.FLOAT_BYTES * first_row * head_dim
    scores = simd.address(scratch.scores) + simd.FLOAT_BYTES * first_row * width
    for begin in range(_first_block(first_row, block_size, scratch), count, block_size):
        _fetch_block(keys, head, table, begin + block_size, count)
        slots = block_address(keys, table[begin // block_size], head)
        columns = min(block_size, count - begin)
        target = scores + simd.FLOAT_BYTES * begin
        simd.dot_rows(queries, head_dim, num_rows, slots, stride, columns, head_dim, None, target, width, keys)


@jit.compiled
def _weigh(values: Cache, head: int, table: _Int32Array, first_row: int, group: int, scratch: Scratch) -> None:
    """sums[rows] = scores · values, every row over the positions it may see, in ascending order."""
    head_dim, width = scratch.queries.shape[1], scratch.scores.shape[1]
    block_size, stride = values.shape[2], values.shape[3]
    num_rows = scratch.num_rows[0]
    count = scratch.visible[num_rows - 1]
    for row in range(first_row, num_rows):
        for d in range(head_dim):
            scratch.sums[row, d] = np.float32(0.0)
    scores, sums = simd.address(scratch.scores), simd.address(scratch.sums)
    for begin in range(_first_block(first_row, block_size, scratch), count, block_size):
        _fetch_block(values, head, table, begin + block_size, count)
        slots = block_address(values, table[begin // block_size], head)
        end = begin + block_size
        row = first_row
        while row < num_rows and scratch.hidden[row] < end:
            # Where all rows see all of the block, they go together; else the heads of one token do.
            whole = scratch.visible[row] >= end and scratch.hidden[num_rows - 1] <= begin
            rows = num_rows - row if whole else group
            first = max(begin, scratch.hidden[row])
            columns = min(end, scratch.visible[row]) - first
            if columns > 0:
                weights = scores + simd.FLOAT_BYTES * (row * width + first)
                seen = slots + int((first - begin) * stride * values.itemsize)
                target = sums + simd.FLOAT_BYTES * row * head_dim
                simd.add_weighted_rows(weights, width, rows, seen, stride, columns, head_dim, target, head_dim, values)
            row += rows


@jit.compiled
def _cap_scores(softcap: jit.Float32, first_row: int, scratch: Scratch) -> None:
    if softcap <= 0:
        return
    for row in range(first_row, scratch.num_rows[0]):
        for i in range(scratch.visible[row]):
            scratch.scores[row, i] = softcap * tanh(scratch.scores[row, i] / softcap)


@jit.compiled
def _softmax(first_row: int, scratch: Scratch) -> None:
    """Every row's maximum, its scores as exponentials, and their sum.

    Loops over scores begin at 0, though those before the window hold anything and are never used: from another start
    they would not become vector code.
    """
    width, scores = scratch.scores.shape[1], simd.address(scratch.scores)
    for row in range(first_row, scratch.num_rows[0]):
        hidden, seen = scratch.hidden[row], scratch.visible[row]
        start = scores + simd.FLOAT_BYTES * int(row * width + hidden)
        largest = simd.maximum(start, seen - hidden)
        for i in range(seen):
            scratch.scores[row, i] = exp_of_negative(scratch.scores[row, i] - largest)
        scratch.max[row] = largest
        scratch.sum[row] = simd.dot(start, simd.address(scratch.ones), seen - hidden)


@jit.compiled
def _do_segment(
    keys: Cache, values: Cache, head: int, table: _Int32Array, group: int, softcap: jit.Float32, scratch: Scratch
) -> int:
    """Maximum, sum and weighted values of one segment, for the rows from the one returned on that see any of it."""
    first_row = 0
    while scratch.visible[first_row] <= 0:
        first_row += group
    if keys.itemsize == 1:
        int8.score(keys, values, head, table, first_row, scratch)
        _cap_scores(softcap, first_row, scratch)
        int8.softmax(values, head, table, first_row, scratch)
        int8.add_values(values, head, table, first_row, scratch)
    else:
        begin = _first_block(first_row, keys.shape[2], scratch)
        _fetch_block(keys, head, table, begin, begin + 1)
        _score(keys, head, table, first_row, scratch)
        _cap_scores(softcap, first_row, scratch)
        _fetch_block(values, head, table, begin, begin + 1)
        _softmax(first_row, scratch)
        _weigh(values, head, table, first_row, group, scratch)
    return first_row


@jit.compiled
def _see(begin: int, position: int, num_rows: int, group: int, window: int, scratch: Scratch) -> None:
    """Which rows of the tile see what of the segment that begins at position `begin`."""
    width = scratch.scores.shape[1]
    for row in range(num_rows):
        seen = position + row // group + 1 - begin
        scratch.visible[row] = min(seen, width)
        scratch.hidden[row] = max(0, seen - window)
    while scratch.hidden[num_rows - 1] >= width:
        num_rows -= group
    scratch.num_rows[0] = num_rows


@jit.compiled
def _fold(
    later_max: _Float32Array,
    later_sum: _Float32Array,
    later: _Float32Array,
    later_row: int,
    total_max: _Float32Array,
    total_sum: _Float32Array,
    total: _Float32Array,
    rows: range,
) -> None:
    """Add a segment's maxima, sums of exponentials and weighted values to some rows' totals of the segments before.

    Of the segment the rows from `later_row` on. One call for all rows, because handing over arrays takes its time.
    """
    size = total.shape[1]
    for row in rows:
        later_at = later_row + row - rows.start
        difference = later_max[later_at] - total_max[row]
        old_share, new_share = np.float32(1.0), np.float32(1.0)
        if difference > 0:
            old_share = exp(-difference)
            total_max[row] = later_max[later_at]
        else:
            new_share = exp(difference)
        total_sum[row] = total_sum[row] * old_share + later_sum[later_at] * new_share
        x = simd.address(later) + simd.FLOAT_BYTES * size * later_at
        simd.blend(x, new_share, simd.address(total) + simd.FLOAT_BYTES * size * row, old_share, size)


@jit.compiled
def _clear_totals(num_rows: int, scratch: Scratch) -> None:
    for row in range(num_rows):
        scratch.total_max[row] = -np.float32(np.inf)
        scratch.total_sum[row] = np.float32(0.0)
        for d in range(scratch.total.shape[1]):
            scratch.total[row, d] = np.float32(0.0)


@jit.compiled
def _keep_partial(partial: int, first_head: int, group: int, scratch: Scratch, partials: Partials) -> None:
    for row in range(group):
        partials.max[partial, first_head + row] = scratch.max[row]
        partials.sum[partial, first_head + row] = scratch.sum[row]
        for d in range(scratch.sums.shape[1]):
            partials.sums[partial, first_head + row, d] = scratch.sums[row, d]


@jit.compiled
def do_unit(
    unit: _Int64Array,
    head: int,
    position: int,
    query: _Float32Array,
    token_stride: int,
    keys: Cache,
    values: Cache,
    table: _Int32Array,
    rules: Scoring,
    scratch: Scratch,
    partials: Partials,
    out: _Float32Array,
) -> None:
    """One unit for one KV head; `position` is that of the unit's first token, `table` the row's blocks.

    A split unit whose segment lies before the window leaves nothing.
    """
    group, head_dim, width = out.shape[1] // keys.shape[1], out.shape[2], scratch.scores.shape[1]
    token, num_rows = unit[TOKEN], unit[NUM_TOKENS] * group
    start = max(unit[SEGMENT], first_segment(position, rules.window, width))
    if start >= unit[END_SEGMENT]:
        return
    first = query[token * token_stride + head * group * head_dim :]
    if keys.itemsize == 1:
        int8.take_queries(first, token_stride, unit[NUM_TOKENS], group, rules.scale, scratch)
    else:
        _take_queries(first, token_stride, unit[NUM_TOKENS], group, rules.scale, scratch.queries)
    _clear_totals(num_rows, scratch)
    for segment in range(start, unit[END_SEGMENT]):
        begin = segment * width
        _see(begin, position, num_rows, group, rules.window, scratch)
        blocks = table[begin // keys.shape[2] :]
        first_row = _do_segment(keys, values, head, blocks, group, rules.softcap, scratch)
        if unit[IS_SPLIT] == 1:
            _keep_partial(unit[PARTIAL], head * group, group, scratch, partials)
            return
        totals = (scratch.total_max, scratch.total_sum, scratch.total)
        _fold(scratch.max, scratch.sum, scratch.sums, first_row, *totals, range(first_row, scratch.num_rows[0]))
    for i in range(unit[NUM_TOKENS]):
        for member in range(group):
            row = i * group + member
            for d in range(head_dim):
                out[token + i, head * group + member, d] = scratch.total[row, d] / scratch.total_sum[row]


@jit.compiled
def fold_partials(first: int, end: int, first_head: int, end_head: int, partials: Partials, out: _Float32Array) -> None:
    """Fold the partial results first:end of one decode row, for some of its heads; out: [num_heads, head_dim]."""
    group, head_dim = end_head - first_head, out.shape[1]
    total_max = np.full(group, -np.float32(np.inf), dtype=np.float32)
    total_sum, total = np.zeros(group, dtype=np.float32), np.zeros((group, head_dim), dtype=np.float32)
    for i in range(first, end):
        later = (partials.max[i], partials.sum[i], partials.sums[i])
        _fold(*later, first_head, total_max, total_sum, total, range(group))
    for row in range(group):
        for d in range(head_dim):
            out[first_head + row, d] = total[row, d] / total_sum[row]


@jit.compiled_parallel
def attend(
    query: _Float32Array,
    token_stride: int,
    keys: Cache,
    values: Cache,
    block_tables: _Int32Array,
    cu_seqlens: _Int32Array,
    context_lens: _Int32Array,
    rules: Scoring,
    out: _Float32Array,
    num_workers: int,
) -> None:
    """The operation on arrays that were checked; `query` is flat, its tokens `token_stride` elements apart."""
    num_kv_heads, block_size = keys.shape[1], keys.shape[2]
    num_heads, head_dim = out.shape[1], out.shape[2]
    group = num_heads // num_kv_heads
    tokens, width = tile_tokens(group), segment_positions(block_size)
    num_units, num_partials = count_units(cu_seqlens, context_lens, tokens, width)
    units = np.empty((num_units, 7), dtype=np.int64)
    first_partial = np.empty(context_lens.shape[0] + 1, dtype=np.int64)
    fill_units(cu_seqlens, context_lens, tokens, width, units, first_partial)
    partial_max = np.empty((num_partials, num_heads), dtype=np.float32)
    partial_sum = np.empty((num_partials, num_heads), dtype=np.float32)
    partial_sums = np.empty((num_partials, num_heads, head_dim), dtype=np.float32)
    for worker in numba.prange(num_workers):
        scratch = new_scratch(tokens * group, head_dim, width)
        for i in range(worker, num_units * num_kv_heads, num_workers):
            partials = Partials(partial_max, partial_sum, partial_sums)
            unit, head = units[i // num_kv_heads], i % num_kv_heads
            row, token = unit[ROW], unit[TOKEN]
            position = context_lens[row] - (cu_seqlens[row + 1] - token)
            table = block_tables[row]
            do_unit(unit, head, position, query, token_stride, keys, values, table, rules, scratch, partials, out)
    # Serial: folding is a hundredth of the work, and another parallel region costs more than it saves.
    for row in range(len(context_lens)):
        if first_partial[row + 1] > first_partial[row]:
            partials = Partials(partial_max, partial_sum, partial_sums)
            first = first_partial[row] + first_segment(context_lens[row] - 1, rules.window, width)
            fold_partials(first, first_partial[row + 1], 0, num_heads, partials, out[cu_seqlens[row]])

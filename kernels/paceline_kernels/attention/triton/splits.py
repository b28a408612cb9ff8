"""attention of short rows on a GPU: all programs share the batch's KV evenly, whatever the contexts.

Scores are computed transposed, positions by query heads: positions fill the 64 rows of a matrix instruction, and the
packed heads of a KV head are its few columns, so that keys and values are read from shared memory once and nothing is
spent on heads that do not exist. Each program takes an equal share of the line of quanta (see `units`) and
leaves a partial result wherever a head's context goes on in another share; `fold_partials` puts those together.

A quantum is a tile, and what one program does of a head is one sum. So a token's bits depend on its batch mates: where
they must not, short rows are chunks.

Knows quanta and partial results; what a score is, `tiles` knows, and what is done to blocks copied in bulk, `blocks`.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paceline_kernels.attention.triton.blocks import attend_span_in_bulk
from paceline_kernels.attention.triton.tiles import (
    INT8_FACTOR,
    LOG2_E,
    capped,
    load_columns,
    load_rows,
    load_scales,
    slots_of,
    widened,
    within_float16,
)
from paceline_kernels.attention.triton.units import find_row, num_quanta, share_of, share_start, short_row


@triton.jit(do_not_specialize=["num_rows", "table_stride", "window"])
def attend_splits(
    out,  # [num_tokens, num_heads, DIM]
    partials,  # [partials, PACKED, DIM] float32: values weighted by exp2(score - max)
    statistics,  # [partials, 2, PACKED] float32: max, sum of exp2(score - max)
    query,  # [num_tokens, num_heads, DIM], tokens query_stride apart
    key_cache,  # [blocks, KV_HEADS, BLOCK_SIZE, DIM]; BULK: a descriptor of it, see `blocks`
    value_cache,  # the same
    key_scales,  # float32: [blocks, KV_HEADS, BLOCK_SIZE] of int8, [KV_HEADS] of float8, else None
    value_scales,  # the same
    block_tables,  # [num_rows, table_stride] int32
    cu_seqlens,  # [num_rows + 1] int32
    context_lens,  # [num_rows] int32
    num_rows,
    query_stride,
    table_stride,
    window,  # 2**30: none
    scale,
    softcap,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    SHORT: tl.constexpr,  # tokens of a row, at most
    PACKED: tl.constexpr,  # at least SHORT * GROUP, a power of two
    TILE: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    TURNED: tl.constexpr,  # values are loaded as they lie, and turned in shared memory
    STEP: tl.constexpr,
    BULK: tl.constexpr,
    EARLY: tl.constexpr,  # see `fold_partials`
):
    """One program's share of all short rows."""
    if EARLY:
        gdc_launch_dependents()
    total = num_quanta(cu_seqlens, context_lens, num_rows, window, SHORT, TILE, STEP) * KV_HEADS
    program = tl.program_id(0)
    num_programs = tl.minimum(tl.num_programs(0), total)
    if program >= num_programs:
        return
    place = share_start(program, num_programs, total)
    end = share_start(program + 1, num_programs, total)
    row, before = find_row(place, cu_seqlens, context_lens, num_rows, window, KV_HEADS, SHORT, TILE, STEP)
    while place < end:
        first, count = short_row(cu_seqlens, context_lens, row, num_rows, window, SHORT, TILE)
        within = place - before * KV_HEADS
        if within < count * KV_HEADS:
            head, quantum = within // count, within % count
            span = tl.minimum(end - place, count - quantum)
            partial = 2 * program + (quantum == 0).to(tl.int32)
            if BULK:
                attend_span_in_bulk(
                    out,
                    partials + partial.to(tl.int64) * (PACKED * DIM),
                    statistics + partial.to(tl.int64) * (2 * PACKED),
                    query,
                    key_cache,
                    value_cache,
                    key_scales,
                    value_scales,
                    block_tables + row.to(tl.int64) * table_stride,
                    cu_seqlens + row,
                    tl.load(context_lens + row),
                    query_stride,
                    window,
                    scale,
                    softcap,
                    head,
                    (first + quantum) * TILE,
                    (first + quantum + span) * TILE,
                    span == count,
                    KV_HEADS,
                    GROUP,
                    BLOCK_SIZE,
                    DIM,
                    PACKED,
                    TILE,
                    CAPPED,
                    WINDOWED,
                )
            else:
                _attend_span(
                    out,
                    partials + partial.to(tl.int64) * (PACKED * DIM),
                    statistics + partial.to(tl.int64) * (2 * PACKED),
                    query,
                    key_cache,
                    value_cache,
                    key_scales,
                    value_scales,
                    block_tables + row.to(tl.int64) * table_stride,
                    cu_seqlens + row,
                    tl.load(context_lens + row),
                    query_stride,
                    window,
                    scale,
                    softcap,
                    head,
                    (first + quantum) * TILE,
                    (first + quantum + span) * TILE,
                    span == count,
                    KV_HEADS,
                    GROUP,
                    BLOCK_SIZE,
                    DIM,
                    DIM_PADDED,
                    PACKED,
                    TILE,
                    CAPPED,
                    WINDOWED,
                    TURNED,
                )
            place += span
        else:
            before += count
            row += 1


@triton.jit
def _attend_span(
    out,
    partial,
    statistics,
    query,
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    table,
    cu_seqlens,  # at the row
    context_len,
    query_stride,
    window,
    scale,
    softcap,
    head,
    start,
    end,
    is_whole,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    PACKED: tl.constexpr,
    TILE: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    TURNED: tl.constexpr,
):
    """The positions start:end of a row and KV head, for all its tokens: the result itself if that is all they see."""
    PER_SLOT: tl.constexpr = key_cache.dtype.element_ty == tl.int8
    DOT_TYPE: tl.constexpr = query.dtype.element_ty if key_scales is None else tl.float16
    first_token = tl.load(cu_seqlens)
    tokens = tl.load(cu_seqlens + 1) - first_token
    packed, dims = tl.arange(0, PACKED), tl.arange(0, DIM_PADDED)
    token = packed // GROUP
    positions = context_len - tokens + token
    heads = (first_token + token).to(tl.int64) * query_stride + (head * GROUP + packed % GROUP) * DIM
    stored = (token < tokens)[None, :] & (dims < DIM)[:, None]
    q = tl.load(query + heads[None, :] + dims[:, None], mask=stored, other=0.0)
    factor = tl.full([PACKED], 1.0, tl.float32) * scale
    if q.dtype != DOT_TYPE:
        q, size = within_float16(q, 0)
        factor *= size
    if (key_scales is not None) and not PER_SLOT:
        factor *= tl.load(key_scales + head)
    largest = tl.full([PACKED], float("-inf"), tl.float32)
    sums = tl.zeros([PACKED], tl.float32)
    values = tl.zeros([DIM_PADDED, PACKED], tl.float32)
    first_seen = tl.maximum(context_len - tokens + 1 - window, 0)
    start = tl.maximum(start, first_seen // TILE * TILE)
    for tile in range(start, tl.minimum(end, context_len), TILE):
        slot_positions = tile + tl.arange(0, TILE)
        inside = slot_positions < context_len
        if WINDOWED:
            inside &= slot_positions >= first_seen
        slots = slots_of(table, head, tile, inside, KV_HEADS, BLOCK_SIZE, TILE, True)
        k = widened(load_rows(key_cache, slots, inside, DIM, DIM_PADDED, True), DOT_TYPE)
        scores = tl.dot(k, q) * factor[None, :]
        if PER_SLOT:
            scores *= load_scales(key_scales, slots, inside, True)[:, None]
        if CAPPED:
            scores = capped(scores, softcap)
        seen = (slot_positions[:, None] <= positions[None, :]) & (slot_positions[:, None] > positions[None, :] - window)
        scores = tl.where(seen, scores * LOG2_E, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 0))
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - shift[None, :])
        decay = tl.exp2(largest - shift)
        sums = sums * decay + tl.sum(weights, 0)
        if PER_SLOT:
            weights *= (load_scales(value_scales, slots, inside, True) * INT8_FACTOR)[:, None]
        if TURNED:
            v = tl.trans(widened(load_rows(value_cache, slots, inside, DIM, DIM_PADDED, True), DOT_TYPE))
        else:
            v = widened(load_columns(value_cache, slots, inside, DIM, DIM_PADDED), DOT_TYPE)
        values = tl.dot(v, weights.to(DOT_TYPE), values * decay[None, :])
        largest = new_largest
    if PER_SLOT:
        values *= 1.0 / INT8_FACTOR
    elif value_scales is not None:
        values *= tl.load(value_scales + head)
    if is_whole:
        places = (first_token + token).to(tl.int64) * (KV_HEADS * GROUP * DIM) + (head * GROUP + packed % GROUP) * DIM
        result = (values / sums[None, :]).to(out.dtype.element_ty)
        tl.store(out + places[None, :] + dims[:, None], result, mask=stored)
    else:
        tl.store(partial + packed[None, :] * DIM + dims[:, None], values, mask=stored)
        tl.store(statistics + packed, largest)
        tl.store(statistics + PACKED + packed, sums)


@triton.jit(do_not_specialize=["num_rows", "num_programs", "window"])
def fold_partials(
    out,
    partials,
    statistics,
    cu_seqlens,
    context_lens,
    num_rows,
    num_programs,
    window,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    SHORT: tl.constexpr,
    PACKED: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    PARTS: tl.constexpr,  # partial results folded at a time
    EARLY: tl.constexpr,  # launched while `attend_splits` runs: its results are waited for here
):
    """The result of one query head of one token, out of what programs left of it; grid [num_rows, heads * tokens].

    The second axis is [KV_HEADS, tokens, GROUP], `tokens` as many as a short row of this batch may have.
    """
    if EARLY:
        gdc_wait()
    row = tl.program_id(0)
    per_head = tl.num_programs(1) // KV_HEADS
    head, packed = tl.program_id(1) // per_head, tl.program_id(1) % per_head
    first_token = tl.load(cu_seqlens + row)
    _, count = short_row(cu_seqlens, context_lens, row, num_rows, window, SHORT, TILE)
    if (count == 0) | (packed >= (tl.load(cu_seqlens + row + 1) - first_token) * GROUP):
        return
    before = num_quanta(cu_seqlens, context_lens, row, window, SHORT, TILE, STEP)
    place = before * KV_HEADS + head * count
    total = num_quanta(cu_seqlens, context_lens, num_rows, window, SHORT, TILE, STEP) * KV_HEADS
    num_programs = tl.minimum(num_programs, total)
    first_partial = share_of(place, num_programs, total)
    parts = share_of(place + count - 1, num_programs, total) - first_partial + 1
    if parts == 1:
        return
    dims = tl.arange(0, DIM_PADDED)
    largest, sums = float("-inf"), 0.0
    values = tl.zeros([DIM_PADDED], tl.float32)
    for start in range(0, parts, PARTS):
        index = start + tl.arange(0, PARTS)
        # A program's first partial goes on with a head, its second begins one.
        partial = 2 * (first_partial + index).to(tl.int64) + (index == 0).to(tl.int64)
        exists = index < parts
        part_largest = tl.load(statistics + partial * (2 * PACKED) + packed, mask=exists, other=float("-inf"))
        part_sums = tl.load(statistics + partial * (2 * PACKED) + PACKED + packed, mask=exists, other=0.0)
        part_values = tl.load(
            partials + (partial * PACKED + packed)[:, None] * DIM + dims[None, :],
            mask=exists[:, None] & (dims < DIM)[None, :],
            other=0.0,
        )
        new_largest = tl.maximum(largest, tl.max(part_largest, 0))
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(part_largest - shift)
        decay = tl.exp2(largest - shift)
        sums = sums * decay + tl.sum(part_sums * weights, 0)
        values = values * decay + tl.sum(part_values * weights[:, None], 0)
        largest = new_largest
    place_out = (first_token + packed // GROUP).to(tl.int64) * (KV_HEADS * GROUP) + head * GROUP + packed % GROUP
    tl.store(out + place_out * DIM + dims, (values / sums).to(out.dtype.element_ty), mask=dims < DIM)

"""attention of chunks on a GPU: a tile of tokens of one row and KV head, its query heads packed, over all it sees.

Tiles of keys begin at multiples of TILE, whatever the chunk, and a position that a token does not see adds an exact
zero, so a token's bits depend neither on chunks nor on batch mates.

Knows tiles of tokens; what a score is, `tiles` knows.
"""

import triton
import triton.language as tl

from paceline_kernels.attention.triton.tiles import (
    INT8_FACTOR,
    LOG2_E,
    capped,
    load_rows,
    load_scales,
    slots_of,
    widened,
    within_float16,
)
from paceline_kernels.attention.triton.units import find_tile


@triton.jit(do_not_specialize=["num_rows", "table_stride", "window"])
def attend_chunks(
    out,  # [num_tokens, num_heads, DIM]
    query,  # [num_tokens, num_heads, DIM], tokens query_stride apart
    key_cache,  # [blocks, KV_HEADS, BLOCK_SIZE, DIM]
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
    SHORT: tl.constexpr,  # rows of so many tokens at most are not done here
    ROWS: tl.constexpr,  # tokens times heads of a tile, at least GROUP
    TILE: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    STEP: tl.constexpr,
):
    """One tile of tokens; grid [tiles * KV_HEADS], programs beyond the batch's tiles have nothing to do."""
    TOKENS: tl.constexpr = ROWS // GROUP
    head = tl.program_id(0) % KV_HEADS
    row, tile = find_tile(tl.program_id(0) // KV_HEADS, cu_seqlens, num_rows, SHORT, TOKENS, STEP)
    if row >= num_rows:
        return
    first_token, end_token = tl.load(cu_seqlens + row), tl.load(cu_seqlens + row + 1)
    context_len = tl.load(context_lens + row)
    packed, dims = tl.arange(0, ROWS), tl.arange(0, DIM_PADDED)
    token = first_token + tile * TOKENS + packed // GROUP
    positions = context_len - end_token + token
    stored = ((packed < TOKENS * GROUP) & (token < end_token))[:, None] & (dims < DIM)[None, :]
    heads = head * GROUP + packed % GROUP
    places = token.to(tl.int64) * query_stride + heads * DIM
    q = tl.load(query + places[:, None] + dims[None, :], mask=stored, other=0.0)
    factor = tl.full([ROWS], 1.0, tl.float32) * scale
    if (key_scales is not None) and q.dtype != tl.float16:
        q, size = within_float16(q, 1)
        factor *= size
    if (key_scales is not None) and key_cache.dtype.element_ty != tl.int8:
        factor *= tl.load(key_scales + head)
    first_position = context_len - end_token + first_token + tile * TOKENS
    last_position = tl.minimum(first_position + TOKENS, context_len) - 1
    # Tiles from `some_see` on hold positions that some token does not see; with a window any may: two more loops beside
    # would take registers that heads of 256 dimensions do not leave.
    start = tl.maximum(first_position + 1 - window, 0) // TILE * TILE
    some_see = tl.maximum((first_position + 1) // TILE * TILE, start)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    sums = tl.zeros([ROWS], tl.float32)
    values = tl.zeros([ROWS, DIM_PADDED], tl.float32)
    table = block_tables + row.to(tl.int64) * table_stride
    for part in tl.static_range(1 if WINDOWED else 0, 2):
        end = some_see if part == 0 else last_position + 1
        largest, sums, values = _attend_tiles(
            largest,
            sums,
            values,
            q,
            positions,
            first_position,
            start,
            end,
            key_cache,
            value_cache,
            key_scales,
            value_scales,
            table,
            context_len,
            window,
            factor,
            softcap,
            head,
            KV_HEADS,
            BLOCK_SIZE,
            DIM,
            DIM_PADDED,
            ROWS,
            TILE,
            CAPPED,
            WINDOWED,
            part == 1,
        )
        start = end
    PER_SLOT: tl.constexpr = key_cache.dtype.element_ty == tl.int8
    if PER_SLOT:
        sums *= INT8_FACTOR
    elif value_scales is not None:
        sums /= tl.load(value_scales + head)
    result = (values / sums[:, None]).to(out.dtype.element_ty)
    places = token.to(tl.int64) * (KV_HEADS * GROUP * DIM) + heads * DIM
    tl.store(out + places[:, None] + dims[None, :], result, mask=stored)


@triton.jit
def _attend_tiles(
    largest,
    sums,
    values,
    q,
    positions,
    first_position,
    start,
    end,
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    table,
    context_len,
    window,
    factor,
    softcap,
    head,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The tiles from start to end, added to a running maximum, sum and weighted sum of values.

    MASKED: some of their positions lie beyond a token or before its window. The arithmetic of the others is the same
    either way, step by step, and so are their bits.
    """
    PER_SLOT: tl.constexpr = key_cache.dtype.element_ty == tl.int8
    for tile in range(start, end, TILE):
        slot_positions = tile + tl.arange(0, TILE)
        inside = slot_positions < context_len
        if WINDOWED and MASKED:
            inside &= slot_positions > first_position - window
        slots = slots_of(table, head, tile, inside, KV_HEADS, BLOCK_SIZE, TILE, MASKED)
        k = widened(load_rows(key_cache, slots, inside, DIM, DIM_PADDED, MASKED), q.dtype)
        scores = tl.dot(q, tl.trans(k))
        if PER_SLOT:
            scores *= load_scales(key_scales, slots, inside, MASKED)[None, :]
        if CAPPED:
            scores = capped(scores * factor[:, None], softcap)
        if MASKED:
            seen = slot_positions[None, :] <= positions[:, None]
            if WINDOWED:
                seen &= slot_positions[None, :] > positions[:, None] - window
            scores = tl.where(seen, scores, float("-inf"))
        unit = tl.full([ROWS], LOG2_E, tl.float32) if CAPPED else factor * LOG2_E
        new_largest = tl.maximum(largest, tl.max(scores, 1) * unit)
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest) if MASKED else new_largest
        weights = tl.exp2(scores * unit[:, None] - shift[:, None])
        decay = tl.exp2(largest - shift)
        sums = sums * decay + tl.sum(weights, 1)
        if PER_SLOT:
            weights *= (load_scales(value_scales, slots, inside, MASKED) * INT8_FACTOR)[None, :]
        v = widened(load_rows(value_cache, slots, inside, DIM, DIM_PADDED, MASKED), q.dtype)
        values = tl.dot(weights.to(q.dtype), v, values * decay[:, None])
        largest = new_largest
    return largest, sums, values

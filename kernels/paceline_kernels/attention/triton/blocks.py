"""attention of short rows where blocks are copied in bulk: a tile is 64 slots of one block, copied as they are stored.

A copy by a tensor descriptor is one instruction without addresses or masks, which leaves the multiprocessor to its
products; keys are multiplied as they are stored, straight from shared memory. So that few columns suffice for that,
a query becomes two parts in the type of the keys, side by side in the columns of one product, whose results are added:
of float8, a number and what rounding it left; of int8, the same on a scale of 254 to 1. Together they hold what
bfloat16 does. Of 16 bits the second part is zero: matrix instructions want 16 columns.

Weights of values are columns again, filled up with zeros to 16: with 8 columns operands would go through registers.

Knows the tiles of one span of a row and KV head; which spans there are, `splits` knows.
"""

import triton
import triton.language as tl

from paceline_kernels.attention.triton.tiles import INT8_FACTOR, LOG2_E, capped, load_scales, widened

_MIN_COLUMNS = tl.constexpr(16)
_LARGEST_FLOAT8 = tl.constexpr(448.0)
# Of the parts of a query in int8: the second has what is left of the first, from -1/2 to 1/2, times this.
_LARGEST_INT8, _SECOND_FACTOR = tl.constexpr(127.0), tl.constexpr(254.0)


@triton.jit
def attend_span_in_bulk(
    out,
    partial,
    statistics,
    query,
    key_cache,  # descriptors of [slots of all blocks and KV heads, DIM], TILE slots a copy
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
    PACKED: tl.constexpr,
    TILE: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """The positions start:end of a row and KV head, for all its tokens: the result itself if that is all they see."""
    STORED: tl.constexpr = key_cache.dtype
    PER_SLOT: tl.constexpr = key_cache.dtype == tl.int8
    PARTS: tl.constexpr = 2 if (STORED.primitive_bitwidth == 8 or PACKED < _MIN_COLUMNS) else 1
    FILLED: tl.constexpr = PACKED < _MIN_COLUMNS
    first_token = tl.load(cu_seqlens)
    tokens = tl.load(cu_seqlens + 1) - first_token
    packed, columns, dims = tl.arange(0, PACKED), tl.arange(0, PARTS * PACKED), tl.arange(0, DIM)
    token, column_token = packed // GROUP, columns % PACKED // GROUP
    heads = head * GROUP + columns % PACKED % GROUP
    places = (first_token + column_token).to(tl.int64) * query_stride + heads * DIM
    q = tl.load(query + places[None, :] + dims[:, None], mask=(column_token < tokens)[None, :], other=0.0)
    q, factor = _as_stored(q, columns < PACKED, STORED)
    factor *= scale
    if (key_scales is not None) and not PER_SLOT:
        factor *= tl.load(key_scales + head)
    if not CAPPED:
        factor *= LOG2_E
    positions = context_len - tokens + token
    largest = tl.full([PACKED], float("-inf"), tl.float32)
    sums = tl.zeros([TILE, PACKED], tl.float32)
    values = tl.zeros([DIM, _MIN_COLUMNS if FILLED else PACKED], tl.float32)
    start = tl.maximum(start, tl.maximum(context_len - tokens + 1 - window, 0) // TILE * TILE)
    end = tl.minimum(end, context_len)
    # Tiles before `some_see` hold no position that some token does not see; with a window any may. To hide a position
    # of int8 costs little.
    some_see = tl.maximum(tl.minimum((context_len - tokens + 1) // TILE * TILE, end), start)
    ALL_MASKED: tl.constexpr = PER_SLOT or WINDOWED
    for part in tl.static_range(1 if ALL_MASKED else 0, 2):
        stop = some_see if part == 0 else end
        largest, sums, values = _attend_tiles(
            largest,
            sums,
            values,
            q,
            factor,
            positions,
            start,
            stop,
            key_cache,
            value_cache,
            key_scales,
            value_scales,
            table,
            context_len,
            window,
            softcap,
            head,
            KV_HEADS,
            BLOCK_SIZE,
            TILE,
            PARTS,
            CAPPED,
            WINDOWED,
            part == 1,
            # No copy ahead where there are a tile or two: its memory and registers would be taken from the others.
            None if ALL_MASKED or part == 0 else 1,
        )
        start = stop
    if FILLED:
        values, _ = tl.split(tl.permute(tl.reshape(values, [DIM, 2, PACKED]), (0, 2, 1)))
    sums = tl.sum(sums, 0)
    if PER_SLOT:
        values *= 1.0 / INT8_FACTOR
    elif value_scales is not None:
        values *= tl.load(value_scales + head)
    # Places are 32 bits beyond a pointer of all: 64 bits each would be computed before the tiles, and be spilled.
    exists = (token < tokens)[None, :]
    if is_whole:
        results = (first_token + token).to(tl.int64) * (KV_HEADS * GROUP * DIM) + (head * GROUP + packed % GROUP) * DIM
        result = (values / sums[None, :]).to(out.dtype.element_ty)
        tl.store(out + results[None, :] + dims[:, None], result, mask=exists)
    else:
        tl.store(partial + packed[None, :] * DIM + dims[:, None], values, mask=exists)
        tl.store(statistics + packed, largest)
        tl.store(statistics + PACKED + packed, sums)


@triton.jit
def _as_stored(q, is_first, stored: tl.constexpr):
    """Queries [dims, columns] as parts in the type of keys, and what the products of each column are multiplied with.

    is_first: [columns], whether a column is to hold first parts; columns of second parts hold the same queries.
    """
    if stored.primitive_bitwidth != 8:
        return tl.where(is_first[None, :], q, 0.0).to(stored), tl.full([q.shape[1]], 1.0, tl.float32)
    size = tl.max(tl.abs(q), 0).to(tl.float32)
    size = tl.where(size > 1e-30, size, 1.0)  # the reciprocal of less would be infinite
    if stored == tl.int8:
        whole = q.to(tl.float32) * (1.0 / size)[None, :] * _LARGEST_INT8
        first = tl.floor(whole + 0.5)
        second = tl.floor((whole - first) * _SECOND_FACTOR + 0.5)
        factor = size * tl.where(is_first, 1.0 / _LARGEST_INT8, 1.0 / (_LARGEST_INT8 * _SECOND_FACTOR))
    else:
        whole = q.to(tl.float32) * (1.0 / size)[None, :] * _LARGEST_FLOAT8
        first = whole.to(stored).to(tl.float32)
        second = whole - first
        factor = size * (1.0 / _LARGEST_FLOAT8)
    return tl.where(is_first[None, :], first, second).to(stored), factor


@triton.jit
def _attend_tiles(
    largest,
    sums,  # [TILE, PACKED]: of the positions of all tiles that lie in the same place of theirs
    values,
    q,
    factor,
    positions,
    start,
    end,
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    table,
    context_len,
    window,
    softcap,
    head,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    MASKED: tl.constexpr,
    STAGES: tl.constexpr,  # None: the kernel's
):
    """The tiles from start to end, added to a running maximum, sums and weighted sum of values.

    MASKED: some of their positions lie beyond a token or before its window. What is stored there must not reach a sum,
    were it NaN, which no integer is.
    """
    PER_SLOT: tl.constexpr = key_cache.dtype == tl.int8
    DOT_TYPE: tl.constexpr = q.dtype if key_scales is None else tl.float16
    PACKED: tl.constexpr = sums.shape[1]
    for tile in tl.range(start, end, TILE, num_stages=STAGES):
        slot_positions = tile + tl.arange(0, TILE)
        inside = slot_positions < context_len
        slot = (tl.load(table + tile // BLOCK_SIZE) * KV_HEADS + head) * BLOCK_SIZE + tile % BLOCK_SIZE
        slots = slot + tl.arange(0, TILE)
        products = tl.dot(key_cache.load([slot, 0]), q).to(tl.float32) * factor[None, :]
        scores = _halves_added(products) if PARTS == 2 else products
        if PER_SLOT:
            scores *= load_scales(key_scales, slots, inside, MASKED)[:, None]
        if CAPPED:
            scores = capped(scores, softcap) * LOG2_E
        if MASKED:
            seen = slot_positions[:, None] <= positions[None, :]
            if WINDOWED:
                seen &= slot_positions[:, None] > positions[None, :] - window
            scores = tl.where(seen, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 0))
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest) if MASKED else new_largest
        weights = tl.exp2(scores - shift[None, :])
        decay = tl.exp2(largest - shift)
        sums = sums * decay[None, :] + weights
        if PER_SLOT:
            weights *= (load_scales(value_scales, slots, inside, MASKED) * INT8_FACTOR)[:, None]
        v = widened(value_cache.load([slot, 0]), DOT_TYPE)
        if MASKED and not PER_SLOT:
            v = tl.where(inside[:, None], v, 0.0)
        weights = weights.to(DOT_TYPE)
        if PACKED < _MIN_COLUMNS:
            weights = tl.reshape(tl.permute(tl.join(weights, tl.zeros_like(weights)), (0, 2, 1)), [TILE, 2 * PACKED])
            decay = tl.reshape(tl.permute(tl.join(decay, decay), (1, 0)), [2 * PACKED])
        values = tl.dot(tl.trans(v), weights, values * decay[None, :])
        largest = new_largest
    return largest, sums, values


@triton.jit
def _halves_added(x):
    """[rows, 2 * columns] as [rows, columns], column i and column i + `columns` added."""
    first, second = tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))
    return first + second

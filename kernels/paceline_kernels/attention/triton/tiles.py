"""What both attention kernels do to a tile: fetch keys or values from their blocks, and turn products into scores.

Knows where a slot lies and what a score is; not which tiles there are.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# Weights of int8 values, times a value's scale, leave the range of float16 below or above; times this they are within,
# as long as no value is larger than 130,000.
INT8_FACTOR = tl.constexpr(64.0)


@triton.jit
def slots_of(
    table,
    head,
    start,
    inside,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Where the slots of the positions start:start + TILE of a KV head lie, in slots from the start of a cache: int64.

    `start` is a multiple of TILE. A tile inside one block needs one number of the table, and its slots are neighbours.
    MASKED: positions that are not `inside` have no block, and no entry of the table is read for them; one of a tile is.
    """
    positions = start + tl.arange(0, TILE)
    if BLOCK_SIZE % TILE == 0:
        block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
        return (block * KV_HEADS + head) * BLOCK_SIZE + start % BLOCK_SIZE + tl.arange(0, TILE)
    elif MASKED:
        block = tl.load(table + positions // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    else:
        block = tl.load(table + positions // BLOCK_SIZE).to(tl.int64)
    return (block * KV_HEADS + head) * BLOCK_SIZE + positions % BLOCK_SIZE


@triton.jit
def load_rows(cache, slots, inside, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, MASKED: tl.constexpr):
    """Keys or values [TILE, DIM_PADDED] as stored; 0 beyond DIM and, if MASKED, where not `inside`."""
    dims = tl.arange(0, DIM_PADDED)
    pointers = cache + slots[:, None] * DIM + dims[None, :]
    if MASKED and DIM != DIM_PADDED:
        return tl.load(pointers, mask=inside[:, None] & (dims < DIM)[None, :], other=0.0)
    elif MASKED:
        return tl.load(pointers, mask=inside[:, None], other=0.0)
    elif DIM != DIM_PADDED:
        return tl.load(pointers, mask=(dims < DIM)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def load_columns(cache, slots, inside, DIM: tl.constexpr, DIM_PADDED: tl.constexpr):
    """The same, masked, as [DIM_PADDED, TILE]: loaded that way, not turned, so that copies stay asynchronous."""
    dims = tl.arange(0, DIM_PADDED)
    pointers = cache + dims[:, None] + slots[None, :] * DIM
    if DIM != DIM_PADDED:
        return tl.load(pointers, mask=(dims < DIM)[:, None] & inside[None, :], other=0.0)
    else:
        return tl.load(pointers, mask=inside[None, :], other=0.0)


@triton.jit
def load_scales(scales, slots, inside, MASKED: tl.constexpr):
    """The scales of these slots; 0 where not `inside`, if MASKED."""
    if MASKED:
        return tl.load(scales + slots, mask=inside, other=0.0)
    else:
        return tl.load(scales + slots)


@triton.jit
def capped(scores, softcap):
    """softcap * tanh(score / softcap); exp2 overflowing to infinity gives 1, as it should."""
    return softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E / softcap)) + 1.0))


@triton.jit
def widened(stored, DOT_TYPE: tl.constexpr):
    """Stored numbers as what products are made of: their own type, or float16, which holds all of 8 bits."""
    if stored.dtype == tl.int8:
        # A conversion costs more: the bits of 1024 + n are those of 1024 with n in the lowest.
        bits = (stored.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint16) | 0x6400
        return bits.to(tl.float16, bitcast=True) - 1152.0
    else:
        return stored.to(DOT_TYPE)


@triton.jit
def within_float16(q, AXIS: tl.constexpr):
    """Queries over their largest number each, as float16, and these numbers; bfloat16 leaves the range of float16.

    AXIS: that of dimensions. What bfloat16 tells apart float16 does, too, down to 2**-14 of the largest number.
    """
    size = tl.max(tl.abs(q), AXIS).to(tl.float32)
    size = tl.where(size > 1e-30, size, 1.0)  # the reciprocal of less would be infinite
    return (q.to(tl.float32) * tl.expand_dims(1.0 / size, AXIS)).to(tl.float16), size

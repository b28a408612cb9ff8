"""rope for GPUs: norms of heads, rotation, quantisation and the write to the slots, all between one read and one write.

A head is held as two halves, since dimension i turns with i + head_dim / 2. Each head is computed by itself in float32
and rounded once, so all is batch-invariant. Knows slots; not which request they belong to.
"""

import torch
import triton
import triton.language as tl

from paceline_kernels.gpu import architecture
from paceline_kernels.gpu.architecture import Architecture
from paceline_kernels.rope import HeadNorms

# Heads per program of four warps: with 128 dimensions one 16-byte load of 16-bit numbers per thread and half. A token
# of 32 + 2 * 8 such heads is four programs, so that one token alone occupies four multiprocessors; it moves 24 kB, so
# 4,096 tokens take 24 us at the 4.3 TB/s that a copy reaches on an H200.
HEADS_PER_PROGRAM = {Architecture.SM_80: 16, Architecture.SM_90: 16}
_NUM_WARPS = 4


def rope_and_write_kv(
    qkv: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    norms: HeadNorms | None,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
) -> None:
    architecture.check_fp8("rope_and_write_kv", key_cache)
    num_tokens, all_heads, head_dim = qkv.shape
    num_blocks, num_kv_heads, block_size, _ = key_cache.shape
    if not num_tokens:
        return
    num_heads = all_heads - 2 * num_kv_heads
    per_program = HEADS_PER_PROGRAM[architecture.current()]
    kv_per_program = min(per_program, triton.next_power_of_2(num_kv_heads))
    num_programs = triton.cdiv(num_heads, per_program) + 2 * triton.cdiv(num_kv_heads, kv_per_program)
    rope_and_write_kv_kernel[(num_tokens, num_programs)](
        qkv,
        table,
        positions,
        slot_mapping,
        key_cache,
        value_cache,
        None if norms is None else norms.query_weight,
        None if norms is None else norms.key_weight,
        0.0 if norms is None else norms.eps,
        key_scales,
        value_scales,
        table.shape[0],
        num_blocks,
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        HALF=triton.next_power_of_2(head_dim // 2),
        HEADS_PER_PROGRAM=per_program,
        KV_HEADS_PER_PROGRAM=kv_per_program,
        num_warps=_NUM_WARPS,
    )


@triton.jit(do_not_specialize=["num_positions", "num_blocks"])
def rope_and_write_kv_kernel(
    qkv,
    table,
    positions,
    slot_mapping,
    key_cache,
    value_cache,
    query_weight,
    key_weight,
    eps,
    key_scales,
    value_scales,
    num_positions,
    num_blocks,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr,
    KV_HEADS_PER_PROGRAM: tl.constexpr,
):
    """A program per token and part of its heads: queries first, then keys, then values. HALF: padded half of a head."""
    QUERY_PARTS: tl.constexpr = (HEADS + HEADS_PER_PROGRAM - 1) // HEADS_PER_PROGRAM
    KV_PARTS: tl.constexpr = (KV_HEADS + KV_HEADS_PER_PROGRAM - 1) // KV_HEADS_PER_PROGRAM
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row = qkv + token * ((HEADS + 2 * KV_HEADS) * HEAD_DIM)
    slot = tl.load(slot_mapping + token)
    exists = (slot >= 0) & (slot < num_blocks.to(tl.int64) * BLOCK_SIZE)
    kv_heads = (part - QUERY_PARTS) % KV_PARTS * KV_HEADS_PER_PROGRAM + tl.arange(0, KV_HEADS_PER_PROGRAM)[:, None]
    place = (slot, exists, kv_heads)
    # Names differ between the branches because a name has one shape in a kernel.
    if part < QUERY_PARTS:
        heads = part * HEADS_PER_PROGRAM + tl.arange(0, HEADS_PER_PROGRAM)[:, None]
        first, second = load_halves(row, heads, heads < HEADS, HEAD_DIM, HALF)
        first, second = normalised(first, second, query_weight, eps, HEAD_DIM, HALF)
        first, second = rotated(first, second, table, tl.load(positions + token), num_positions, HEAD_DIM, HALF)
        store_halves(row, heads, heads < HEADS, first, second, HEAD_DIM, HALF)
    elif part < QUERY_PARTS + KV_PARTS:
        keys = row + HEADS * HEAD_DIM
        key_1, key_2 = load_halves(keys, kv_heads, kv_heads < KV_HEADS, HEAD_DIM, HALF)
        key_1, key_2 = normalised(key_1, key_2, key_weight, eps, HEAD_DIM, HALF)
        key_1, key_2 = rotated(key_1, key_2, table, tl.load(positions + token), num_positions, HEAD_DIM, HALF)
        write_slot(key_cache, key_scales, place, key_1, key_2, KV_HEADS, BLOCK_SIZE, HEAD_DIM, HALF)
    else:
        values = row + (HEADS + KV_HEADS) * HEAD_DIM
        value_1, value_2 = load_halves(values, kv_heads, kv_heads < KV_HEADS, HEAD_DIM, HALF)
        write_slot(value_cache, value_scales, place, value_1, value_2, KV_HEADS, BLOCK_SIZE, HEAD_DIM, HALF)


@triton.jit
def load_halves(start, heads, inside, HEAD_DIM: tl.constexpr, HALF: tl.constexpr):
    """Both halves of heads that lie one after the other, each [heads, HALF] float32, 0 where there is nothing."""
    dims = tl.arange(0, HALF)[None, :]
    pointers = start + heads * HEAD_DIM + dims
    mask = inside & (dims < HEAD_DIM // 2)
    first = tl.load(pointers, mask=mask, other=0.0)
    second = tl.load(pointers + HEAD_DIM // 2, mask=mask, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def store_halves(start, heads, inside, first, second, HEAD_DIM: tl.constexpr, HALF: tl.constexpr):
    """The inverse of `load_halves`, rounding to the type that `start` points to."""
    dims = tl.arange(0, HALF)[None, :]
    pointers = start + heads * HEAD_DIM + dims
    mask = inside & (dims < HEAD_DIM // 2)
    tl.store(pointers, first.to(start.dtype.element_ty), mask=mask)
    tl.store(pointers + HEAD_DIM // 2, second.to(start.dtype.element_ty), mask=mask)


@triton.jit
def normalised(first, second, weight, eps, HEAD_DIM: tl.constexpr, HALF: tl.constexpr):
    """Each head over its root mean square, times the weight [HEAD_DIM]; as it was if there is no weight."""
    if weight is not None:
        dims = tl.arange(0, HALF)[None, :]
        mask = dims < HEAD_DIM // 2
        scale = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / HEAD_DIM + eps)[:, None]
        first = tl.load(weight + dims, mask=mask, other=0.0).to(tl.float32) * (first * scale)
        second = tl.load(weight + HEAD_DIM // 2 + dims, mask=mask, other=0.0).to(tl.float32) * (second * scale)
    return first, second


@triton.jit
def rotated(first, second, table, position, num_positions, HEAD_DIM: tl.constexpr, HALF: tl.constexpr):
    """The halves turned by the angles of a position; NaN at a position that the table does not have."""
    dims = tl.arange(0, HALF)[None, :]
    mask = (dims < HEAD_DIM // 2) & (position >= 0) & (position < num_positions)
    angles = table + position.to(tl.int64) * HEAD_DIM + dims
    cosines = tl.load(angles, mask=mask, other=float("nan"))
    sines = tl.load(angles + HEAD_DIM // 2, mask=mask, other=float("nan"))
    return first * cosines - second * sines, second * cosines + first * sines


@triton.jit
def write_slot(
    cache,
    scales,
    place,
    first,
    second,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
):
    """Heads into one slot, as the cache's type wants them. place: (slot, whether it exists, heads [heads, 1])."""
    slot, exists, heads = place
    inside = (heads < KV_HEADS) & exists
    # In slots from the start of the cache, of every head: [heads, 1].
    places = ((slot // BLOCK_SIZE) * KV_HEADS + heads) * BLOCK_SIZE + slot % BLOCK_SIZE
    if cache.dtype.element_ty == tl.int8:
        first, second, scale = as_int8(first, second, HEAD_DIM, HALF)
        tl.store(scales + places, scale, mask=inside)
    elif scales is not None:
        scale = tl.load(scales + heads, mask=heads < KV_HEADS, other=1.0)
        first, second = within_fp8(first / scale), within_fp8(second / scale)
    store_halves(cache, places, inside, first, second, HEAD_DIM, HALF)


@triton.jit
def as_int8(first, second, HEAD_DIM: tl.constexpr, HALF: tl.constexpr):
    """Integers from -127 to 127 as floats, ties to even, and the scale of each head, [heads, 1], which shows a NaN."""
    dims = tl.arange(0, HALF)[None, :]
    real = dims < HEAD_DIM // 2
    first, second = tl.where(real, first, 0.0), tl.where(real, second, 0.0)
    largest = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), axis=1)[:, None]
    # Maxima pass over NaN; a sum does not. Where all is finite this adds 0.
    spoilt = tl.sum(first * 0.0 + second * 0.0, axis=1)[:, None]
    scale = largest / 127.0 + spoilt
    inverse = tl.where(scale > 0.0, 1.0 / scale, 0.0)
    # Adding 1.5 * 2**23 leaves no bits for a fraction.
    first = (first * inverse + 12582912.0) - 12582912.0
    second = (second * inverse + 12582912.0) - 12582912.0
    return first, second, scale


@triton.jit
def within_fp8(x):
    """At the largest number of 8-bit floats where it lies beyond, rather than NaN. NaN stays NaN."""
    return tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))

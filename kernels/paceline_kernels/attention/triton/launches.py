"""How both attention kernels are launched, by architecture, padded head size and bytes per stored number.

What a table may hold is bounded by registers (65,536 per multiprocessor, no spills but one) and shared memory (227 KiB
on sm_90, 163 on sm_80); `python -m kernel_resources` says what each line takes. Figures are for an H200: 132
multiprocessors at about 1.75 GHz, 4.3 TB/s of copy, 790 TFLOP/s of bfloat16 products.

Splits. A tile of 64 positions of one KV head is 64 * head size * 2 (keys, values) numbers: 32 KiB of bfloat16 at 128.
At 4.3 TB/s a multiprocessor has 1,760 cycles for it, at one byte per number 880. Four warps issue one instruction per
cycle each, so that a warp may spend that many on it; it spends, at 128, by its loop in SASS:

    bfloat16, blocks of 16 / 64 slots     566 / 418
    float8_e4m3, blocks of 16 / 64        720 / 570
    int8, blocks of 16 / 64               1,060 / 865    above what memory would allow: blocks of 64 are better

Blocks copied in bulk (`BULK_SPLITS`; blocks of 64, heads of 128) take 335 instructions per warp and tile and no
addresses; what is in flight is two tiles per program. On an H200 they read 4.2 TB/s of float8 and int8 and 4.4 of
bfloat16, where the kernel that addresses every slot read 3.4, 2.3 and 4.3; loads by addresses with the same products
took 425 to 508 us at 64 rows of 8,192 positions, copies 257 to 269 of 8 bits. By `kernel_resources` float8 has 153
registers, so that three programs share a multiprocessor, and int8 fits into 128, so that four do; bfloat16's two are
bounded by shared memory.

Products cost little: 64 * 16 * 128 * 4 operations per tile, 16 columns of which 4 are used where a KV head has 4 query
heads, are 0.5 MFLOP, 90 cycles. Bytes in flight decide: 4.3 TB/s times about 1 us are 33 KiB per multiprocessor. A tile
is in flight while another one is worked on, in each of 2 or 3 programs per multiprocessor.

Chunks. A tile of 128 query rows by 128 positions is 4 * 128 * 128 * 128 = 8.4 MFLOP at head size 128: 2,000 cycles at
full rate, beside 1,020 for its exponentials and 1,360 issued instructions per scheduler, partly in the shadow of the
other warp group's products. Expected between 450 and 500 TFLOP/s. It fetches 64 KiB that all other query rows of the
KV head fetch, too: 29 TB/s over all multiprocessors if none came from the second level, so that heads of one tile of
tokens go first, and tiles after them. On sm_80 tiles of heads of 256 and 8 bits have 16 positions, because with a
window twice as many spill.
"""

from dataclasses import dataclass
from typing import TypeAlias

import torch

from paceline_kernels.gpu.architecture import Architecture


@dataclass(frozen=True, slots=True)
class SplitLaunch:
    """Of `attend_splits`."""

    min_packed: int  # columns of scores: what matrix instructions want at least
    tile: int  # positions
    turned: bool  # see the kernel
    programs: int  # per multiprocessor
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # of a thread, where the compiler would take more than its program's share
    bulk: bool = False  # blocks are copied by descriptors, see `blocks`


@dataclass(frozen=True, slots=True)
class ChunkLaunch:
    """Of `attend_chunks`."""

    rows: int  # tokens times heads
    tile: int  # positions
    num_warps: int
    num_stages: int


# Partial results folded at a time: those of 16 heads' worth of programs, 8 KiB at head size 128, in one warp.
FOLD_PARTS = 16
FOLD_WARPS = 1
# Rows of a batch that a program looks at together to find its own: one per thread of four warps.
ROW_STEP = 128

SM_80, SM_90 = Architecture.SM_80, Architecture.SM_90
Place: TypeAlias = tuple[Architecture, int, int]  # architecture, padded head size, bytes per stored number
SPLITS: dict[Place, SplitLaunch] = {
    (SM_90, 64, 2): SplitLaunch(16, 128, True, 3, 4, 4),
    (SM_90, 128, 2): SplitLaunch(16, 64, True, 3, 4, 4),
    (SM_90, 256, 2): SplitLaunch(16, 64, True, 1, 8, 4),
    (SM_90, 64, 1): SplitLaunch(16, 128, False, 2, 4, 5),
    (SM_90, 128, 1): SplitLaunch(16, 64, False, 2, 4, 5),
    (SM_90, 256, 1): SplitLaunch(16, 32, False, 2, 4, 5),
    (SM_80, 64, 2): SplitLaunch(8, 64, False, 3, 4, 5),
    (SM_80, 128, 2): SplitLaunch(8, 64, False, 2, 4, 5),
    (SM_80, 256, 2): SplitLaunch(8, 32, False, 2, 4, 5),
    (SM_80, 64, 1): SplitLaunch(8, 64, False, 3, 4, 5),
    (SM_80, 128, 1): SplitLaunch(8, 64, False, 2, 4, 5),
    (SM_80, 256, 1): SplitLaunch(8, 32, False, 2, 4, 5),
}
# Where a tile of 64 slots lies in one block: up to 8 columns and no cap of scores, and what takes more registers for
# either. bfloat16 with heads of 256 spills a few registers outside of its loop of whole tiles: with 8 warps, which
# spill none, it takes a fifth longer (`kernels/MEASURED.md`).
BULK_SPLITS: dict[Place, SplitLaunch] = {
    (SM_90, 64, 2): SplitLaunch(8, 64, False, 4, 4, 5, bulk=True),
    (SM_90, 128, 2): SplitLaunch(8, 64, False, 2, 4, 5, bulk=True),
    (SM_90, 256, 2): SplitLaunch(8, 64, False, 1, 4, 5, bulk=True),
    (SM_90, 64, 1): SplitLaunch(8, 64, False, 4, 4, 5, bulk=True),
    (SM_90, 128, 1): SplitLaunch(8, 64, False, 3, 4, 5, bulk=True),
    (SM_90, 256, 1): SplitLaunch(8, 64, False, 2, 4, 5, bulk=True),
}
# What int8 takes instead: a fourth program, for which float8 would spill.
INT8_BULK_SPLITS: dict[Place, SplitLaunch] = {
    (SM_90, 128, 1): SplitLaunch(8, 64, False, 4, 4, 5, max_registers=128, bulk=True),
}
FEW_BULK_COLUMNS, MAX_BULK_COLUMNS = 8, 32
WIDE_BULK_SPLITS: dict[Place, SplitLaunch] = {
    (SM_90, 64, 2): SplitLaunch(8, 64, False, 2, 4, 5, bulk=True),
    (SM_90, 128, 2): SplitLaunch(8, 64, False, 2, 4, 5, bulk=True),
    (SM_90, 64, 1): SplitLaunch(8, 64, False, 2, 4, 5, bulk=True),
    (SM_90, 128, 1): SplitLaunch(8, 64, False, 2, 4, 5, bulk=True),
}
CHUNKS: dict[Place, ChunkLaunch] = {
    (SM_90, 64, 2): ChunkLaunch(128, 128, 8, 3),
    (SM_90, 128, 2): ChunkLaunch(128, 128, 8, 3),
    (SM_90, 256, 2): ChunkLaunch(128, 64, 8, 3),
    (SM_90, 64, 1): ChunkLaunch(128, 64, 8, 4),
    (SM_90, 128, 1): ChunkLaunch(128, 64, 8, 4),
    (SM_90, 256, 1): ChunkLaunch(128, 16, 8, 3),
    (SM_80, 64, 2): ChunkLaunch(128, 64, 8, 4),
    (SM_80, 128, 2): ChunkLaunch(128, 64, 8, 4),
    (SM_80, 256, 2): ChunkLaunch(64, 32, 8, 3),
    (SM_80, 64, 1): ChunkLaunch(128, 64, 8, 4),
    (SM_80, 128, 1): ChunkLaunch(128, 32, 8, 4),
    (SM_80, 256, 1): ChunkLaunch(64, 16, 8, 3),
}


def splits_launch(
    architecture: Architecture, padded: int, cache: torch.Tensor, num_columns: int, *, capped: bool
) -> SplitLaunch:
    """Of `attend_splits`, for so many heads, times tokens, per KV head; padded: a head's size, as kernels hold it."""
    _, _, block_size, head_dim = cache.shape
    place = (architecture, padded, min(cache.element_size(), 2))
    if capped or num_columns > FEW_BULK_COLUMNS:
        bulk = WIDE_BULK_SPLITS.get(place)
    else:
        own = INT8_BULK_SPLITS.get(place) if cache.dtype == torch.int8 else None
        bulk = own or BULK_SPLITS.get(place)
    if bulk and head_dim == padded and block_size % bulk.tile == 0 and num_columns <= MAX_BULK_COLUMNS:
        return bulk
    return SPLITS[place]

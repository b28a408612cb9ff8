"""How both attention kernels are launched, by architecture, padded head size and bytes per stored number.

What a table may hold is bounded by registers (65,536 per multiprocessor, no spills) and shared memory (227 KiB on
sm_90, 163 on sm_80); `python -m kernel_resources` says what each line takes. Figures are for an H200: 132
multiprocessors at about 1.75 GHz, 4.3 TB/s of copy, 790 TFLOP/s of bfloat16 products.

Splits. A tile of 64 positions of one KV head is 64 * head size * 2 (keys, values) numbers: 32 KiB of bfloat16 at 128.
At 4.3 TB/s a multiprocessor has 1,760 cycles for it, at one byte per number 880. Four warps issue one instruction per
cycle each, so that a warp may spend that many on it; it spends, at 128, by its loop in SASS:

    bfloat16, blocks of 16 / 64 slots     566 / 418
    float8_e4m3, blocks of 16 / 64        720 / 570
    int8, blocks of 16 / 64               1,060 / 865    above what memory would allow: blocks of 64 are better

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
# Measured (`kernels/MEASURED.md`) for float8_e4m3 and 16 columns: from so many rows on. With int8, or with more
# columns, two warps have too few registers.
FLOAT8_SPLITS_FROM_ROWS = 8
FLOAT8_SPLITS: dict[Place, SplitLaunch] = {(SM_90, 128, 1): SplitLaunch(16, 64, False, 4, 2, 5)}
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


def splits_launch(place: Place, cache_type: torch.dtype, num_columns: int, num_rows: int) -> SplitLaunch:
    """Of `attend_splits`, for a batch of so many rows with so many heads, times tokens, per KV head."""
    usual = SPLITS[place]
    is_measured = cache_type == torch.float8_e4m3fn and num_columns <= usual.min_packed
    if is_measured and num_rows >= FLOAT8_SPLITS_FROM_ROWS:
        return FLOAT8_SPLITS.get(place, usual)
    return usual

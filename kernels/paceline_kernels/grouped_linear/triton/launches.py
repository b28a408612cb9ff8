"""How products of grouped weights are launched, by architecture and rows, and from where on a library multiplies.

No figure here has been measured: they follow from the instructions of the compiled code (4 bits on sm_90) and from what
was measured of weights of 8 and 16 bits (`linear.triton.launches`). A multiprocessor gets 18.5 bytes of memory in a
cycle of 1.75 GHz, a KiB of words in 55, in which its schedulers issue 221 instructions.

Few rows. A KiB of words takes a warp 199 instructions, of 32 outputs 163, because rows of x are read for both tiles:
three quarters of what can be issued. So 28672 x 4096 in 19 us for one row, a third of bfloat16's time. Sums of x, for
zeros and minima, are 8 more; float8 takes 128 to 157, numbers of a table 375. Where there are few outputs, eight slices
keep as many warps busy as a multiprocessor has room for: 4096 x 4096 in 5 us. Every program reads all of x from the
second level, for 8 rows twice the bytes of its words with 16 outputs; so from 9 rows on programs have 32, and from 33,
with many outputs from 17, they are tiles.

Tiles. A tile of 64 by 64 issues 272 instructions in 512 cycles of its matrix instructions, one of 128 by 128 305 in
1,024, which two groups of warps share: 48 us of 28672 x 4096 by 128 rows. Sums of x are as many matrix instructions
again. They take registers, as several groups in a tile of words do, so tiles of such weights have half the rows.

Many rows. Widening 117 M weights writes 235 MB, 70 us with what is read, whatever the number of rows: less than what
tiles lose to the library from 513 rows on, 193 with zeros or minima.
"""

import sys
from dataclasses import dataclass

from paceline_kernels.gpu.architecture import Architecture


@dataclass(frozen=True, slots=True)
class FewGroupsLaunch:
    """Of `multiply_few_groups`."""

    outputs: int  # of a program
    slices: int  # of the inputs of a step, a tile and a warp each
    steps: int  # that are in flight
    registers: int  # of a thread at most: as many as are free where shared memory bounds the number of programs


@dataclass(frozen=True, slots=True)
class GroupTilesLaunch:
    """Of `multiply_group_tiles`."""

    outputs: int
    tokens: int
    num_warps: int
    num_stages: int


MANY = sys.maxsize
SM_80, SM_90 = Architecture.SM_80, Architecture.SM_90
MANY_OUTPUTS = 16_384
# By architecture, whether weights are plain (without zeros, minima and groups within a tile of words, which take
# registers), and the number of rows up to which it holds: with fewer outputs than that, and with as many.
FEW_ROWS = {
    (SM_90, True): {
        8: (FewGroupsLaunch(16, 8, 3, 80), FewGroupsLaunch(32, 4, 3, 128)),
        16: (FewGroupsLaunch(32, 8, 2, 128), FewGroupsLaunch(32, 4, 3, 168)),
        32: (FewGroupsLaunch(32, 4, 3, 255), None),
    },
    (SM_90, False): {
        8: (FewGroupsLaunch(16, 8, 3, 128), FewGroupsLaunch(32, 4, 3, 128)),
        16: (FewGroupsLaunch(16, 4, 3, 168), FewGroupsLaunch(32, 4, 3, 168)),
        32: (FewGroupsLaunch(16, 4, 3, 255), None),
    },
    (SM_80, True): {
        8: (FewGroupsLaunch(16, 4, 3, 128), FewGroupsLaunch(32, 4, 3, 168)),
        16: (FewGroupsLaunch(32, 4, 3, 255), FewGroupsLaunch(32, 4, 3, 255)),
        32: (FewGroupsLaunch(32, 4, 2, 255), None),
    },
    (SM_80, False): {
        8: (FewGroupsLaunch(16, 4, 3, 128), FewGroupsLaunch(32, 4, 3, 168)),
        16: (FewGroupsLaunch(32, 4, 3, 255), FewGroupsLaunch(32, 4, 3, 255)),
        32: (FewGroupsLaunch(16, 4, 2, 255), None),
    },
}
# By the same. All of a GPU's lines add the inputs up by matrix instructions of one kind, 16 at a time, in one order.
TILES = {
    (SM_90, True): {
        16: GroupTilesLaunch(64, 16, 4, 4),
        64: GroupTilesLaunch(64, 64, 4, 3),
        MANY: GroupTilesLaunch(128, 128, 8, 3),
    },
    (SM_90, False): {
        16: GroupTilesLaunch(64, 16, 4, 4),
        64: GroupTilesLaunch(64, 64, 4, 3),
        MANY: GroupTilesLaunch(128, 64, 8, 3),
    },
    (SM_80, True): {
        16: GroupTilesLaunch(64, 16, 4, 4),
        64: GroupTilesLaunch(64, 64, 4, 3),
        MANY: GroupTilesLaunch(128, 64, 8, 3),
    },
    (SM_80, False): {
        16: GroupTilesLaunch(64, 16, 8, 4),
        MANY: GroupTilesLaunch(64, 64, 8, 3),
    },
}
# Rows up to which tiles are expected to be faster than widened weights, by whether these have zeros or minima.
MAX_TILE_ROWS = {False: 512, True: 192}


def few_rows_launch(
    architecture: Architecture, num_tokens: int, num_outputs: int, *, is_plain: bool
) -> FewGroupsLaunch | None:
    """The first line for at least as many rows; None where tiles are better."""
    for up_to, launches in FEW_ROWS[architecture, is_plain].items():
        if num_tokens <= up_to:
            return launches[num_outputs >= MANY_OUTPUTS]
    return None


def tiles_launch(architecture: Architecture, num_tokens: int, *, is_plain: bool) -> GroupTilesLaunch:
    """The first line for at least as many rows."""
    return next(launch for up_to, launch in TILES[architecture, is_plain].items() if num_tokens <= up_to)

"""How products of matrices are launched, by architecture and bytes per weight, and from where on a library does it.

Figures are for an H200: 132 multiprocessors at about 1.75 GHz, 4.3 TB/s of copy, about 0.8 us from a load to its data,
so that 3.4 MB, 26 KB per multiprocessor, have to be in flight.

Few rows. The weights are the bytes: 16.8 MB at 4096 x 4096 and a byte each, 3.9 us. A second launch, or partial sums
that meet in memory, would cost 1 to 2 us more, so the inputs are split among the warps of one program, which meet in
its shared memory, and programs are small enough for there to be about one per multiprocessor. Each of them reads all of
x from the second level; 32 weight rows of one byte are as many bytes as 16 rows of x, so larger products take 64 of
them. Up to 16 rows two programs fit on a multiprocessor; what is in flight shares the memory evenly, so waves that are
not full cost little there. A step of 512 bytes of 32 weight rows, 16 KiB, has 850 cycles at full bandwidth, in which a
scheduler issues the loop of two warps:

    weights      in flight with 8 rows of x   instructions of two warps, with 8 rows / with 32
    bfloat16     3 steps, 48 + 12 KiB         110
    float8_e4m3  3 steps, 48 + 24 KiB         450
    int8         3 steps, 48 + 24 KiB         580 / 850

Tiles. Weights of 8 bits are widened on their way to the matrix instructions, once per tile: 580 instructions issued per
scheduler for 128 outputs by 64 inputs of int8, 440 of float8_e4m3. By 256 rows those are 4.2 MFLOP, 1,000 cycles at
full rate, so that one hides behind the other; by 64 rows and 64 outputs widening is what takes the time, 10 us of
4,096 inputs.
"""

import sys
from dataclasses import dataclass

import torch

from paceline_kernels.gpu.architecture import Architecture


@dataclass(frozen=True, slots=True)
class FewRowsLaunch:
    """Of `multiply_few_rows`."""

    slices: int  # of the inputs of a step, a warp each
    width: int  # inputs of a slice: 64 bytes of a row of weights
    shared_bytes: int  # what a program may take: half of a multiprocessor's, but for two steps at least
    max_steps: int  # that are in flight


@dataclass(frozen=True, slots=True)
class TilesLaunch:
    """Of `multiply_tiles`."""

    outputs: int
    tokens: int
    width: int  # inputs of a step
    num_warps: int
    num_stages: int


MANY = sys.maxsize
SM_80, SM_90 = Architecture.SM_80, Architecture.SM_90
FEW_ROWS = {
    (SM_90, 1): FewRowsLaunch(8, 64, 96 * 1024, 6),
    (SM_90, 2): FewRowsLaunch(8, 32, 96 * 1024, 6),
    (SM_80, 1): FewRowsLaunch(8, 64, 72 * 1024, 4),
    (SM_80, 2): FewRowsLaunch(8, 32, 72 * 1024, 4),
}
# By the number of rows up to which it is the best. All of a GPU's lines add the inputs up by matrix instructions of one
# kind, 16 at a time, in the same order: on sm_90 those have 64 outputs, which programs of 4 or 8 warps fill.
TILES = {
    (SM_90, 1): {
        16: TilesLaunch(64, 16, 128, 4, 8),
        64: TilesLaunch(64, 64, 128, 4, 4),
        1024: TilesLaunch(128, 128, 128, 8, 4),
        MANY: TilesLaunch(128, 256, 64, 8, 4),
    },
    (SM_90, 2): {
        16: TilesLaunch(64, 16, 128, 4, 5),
        64: TilesLaunch(64, 64, 128, 4, 3),
        1024: TilesLaunch(128, 128, 64, 8, 5),
        MANY: TilesLaunch(128, 256, 64, 8, 4),
    },
    (SM_80, 1): {
        16: TilesLaunch(64, 16, 128, 4, 6),
        64: TilesLaunch(64, 64, 128, 4, 4),
        MANY: TilesLaunch(128, 128, 64, 8, 4),
    },
    (SM_80, 2): {
        16: TilesLaunch(64, 16, 128, 4, 5),
        64: TilesLaunch(64, 64, 64, 4, 4),
        MANY: TilesLaunch(128, 128, 64, 8, 4),
    },
}
# Tiles of outputs that see all rows before the next ones: 1,024 outputs and 2,048 rows run at the same time.
OUTPUT_TILES_TOGETHER = 8
# Of 16 bits. The library reaches 2.7 TB/s at 4096 x 4096 and 3.1 at 6144 x 4096, where there is something to win, but
# 3.7 to 4.2 from 64 M weights on; and 32 rows of x would be as many bytes as the weights of a program.
LIBRARY_FROM_ROWS = 17
LIBRARY_FROM_WEIGHTS = 1 << 26
# Of 8 bits. With more rows x would be four times the bytes of the weights of a program; tiles read it less often.
MAX_FEW_ROWS_SCALED = 32


def outputs_of_a_program(num_outputs: int) -> int:
    """Of `multiply_few_rows`: few enough for about a program per multiprocessor, of which there are 132 or 108."""
    return 16 if num_outputs < 4096 else 32 if num_outputs < 16_384 else 64


def few_rows_launch(architecture: Architecture, weight_type: torch.dtype) -> FewRowsLaunch:
    """Its line."""
    return FEW_ROWS[architecture, _num_bytes(weight_type)]


def tiles_launch(architecture: Architecture, weight_type: torch.dtype, num_tokens: int) -> TilesLaunch:
    """The first line for at least as many rows."""
    lines = TILES[architecture, _num_bytes(weight_type)].items()
    return next(launch for up_to, launch in lines if num_tokens <= up_to)


def _num_bytes(weight_type: torch.dtype) -> int:
    # Where kernels are interpreted, weights of 4 bytes stand for those of 2.
    return min(weight_type.itemsize, 2)

"""How products of matrices are launched, by architecture and bytes per weight, and from where on a library does it.

Figures are for an H200: 132 multiprocessors at about 1.75 GHz, 4.3 TB/s of copy, about 0.8 us from a load to its data,
so that 3.4 MB, 26 KB per multiprocessor, have to be in flight.

Few rows. The weights are the bytes: 16.8 MB at 4096 x 4096 and a byte each, 3.9 us. A second launch, or partial sums
that meet in memory, would cost 1 to 2 us more, so the inputs are split among the warps of one program, which meet in
its shared memory. On sm_90 what is best up to 8 rows, of 8 bits up to 16, was measured (`kernels/MEASURED.md`):
programs of 16 outputs and 4 warps, several of which share a multiprocessor, so that the load is even, and slices by
which a row of weights is read 128 bytes at a time. For more rows of 8 bits, and on sm_80, the prediction that there was
before holds: about a program per multiprocessor, of more outputs where there are more, because each of them reads all
of x from the second level.

    weights           in flight with 8 rows of x
    bfloat16          3 steps, 24 + 12 KiB
    float8_e4m3, int8 3 steps, 24 + 24 KiB

Tiles. Weights of 8 bits are widened on their way to the matrix instructions, once per tile: 580 instructions issued per
scheduler for 128 outputs by 64 inputs of int8, 440 of float8_e4m3. By 256 rows those are 4.2 MFLOP, 1,000 cycles at
full rate, so that one hides behind the other; by 64 rows and 64 outputs widening is what takes the time, 10 us of
4,096 inputs.
"""

import enum
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from paceline_kernels.gpu.architecture import Architecture

_Launch = TypeVar("_Launch")


@dataclass(frozen=True, slots=True)
class FewRowsLaunch:
    """Of `multiply_few_rows`."""

    slices: int  # of the inputs of a step, a warp each
    width: int  # inputs of a slice: 64 or 128 bytes of a row of weights
    max_outputs: int  # of a program
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


class Product(enum.Enum):
    """Which one multiplies."""

    FEW_ROWS = "few rows"
    TILES = "tiles"
    LIBRARY = "library"


MANY = sys.maxsize
SM_80, SM_90 = Architecture.SM_80, Architecture.SM_90
# By (architecture, bytes per weight), and by the number of rows up to which it is the best.
FEW_ROWS = {
    (SM_90, 1): {
        8: FewRowsLaunch(4, 128, 16, 96 * 1024, 3),
        16: FewRowsLaunch(2, 256, 16, 96 * 1024, 3),
        MANY: FewRowsLaunch(8, 64, 64, 96 * 1024, 6),
    },
    (SM_90, 2): {MANY: FewRowsLaunch(4, 64, 16, 96 * 1024, 3)},
    # Half as many outputs as elsewhere: GPUs of 8.6, 8.9 and 12.0 have 99 KiB of shared memory for a program.
    (SM_80, 1): {MANY: FewRowsLaunch(8, 64, 32, 72 * 1024, 4)},
    (SM_80, 2): {MANY: FewRowsLaunch(8, 32, 64, 72 * 1024, 4)},
}
# By the same. All of a GPU's lines add the inputs up by matrix instructions of one
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
# Of int8 by int8, from 65 rows on: 96 KiB in flight and 128 registers, so that two programs share a multiprocessor of
# sm_90. Twice the rows spill on sm_100. Predicted, not measured.
ROUNDED_TILES = TilesLaunch(128, 128, 128, 8, 3)
# Of 16 bits, where inputs are summed in slices and four sums of a tile are kept: smaller tiles, or more warps.
SLICED_TILES = {
    SM_90: {16: TilesLaunch(64, 16, 128, 4, 5), MANY: TilesLaunch(64, 64, 128, 8, 3)},
    SM_80: {16: TilesLaunch(64, 16, 128, 4, 5), MANY: TilesLaunch(64, 64, 64, 8, 4)},
}
FEW_OUTPUTS, SMALL_TILE = 512, 64
# Tiles of outputs that see all rows before the next ones: 1,024 outputs and 2,048 rows run at the same time.
OUTPUT_TILES_TOGETHER = 8
# Of 16 bits: by the number of rows up to which it holds, the product of ours, and from how many weights on the library
# is taken nevertheless. From 17 rows on it always is. On sm_90 it was not beaten at 525 M weights, and at 117 M by few
# rows alone; tiles were within 3 % of it there.
OWN_PRODUCTS = {
    SM_90: {8: (Product.FEW_ROWS, 1 << 28), 16: (Product.TILES, 1 << 26)},
    SM_80: {16: (Product.FEW_ROWS, 1 << 26)},
}
# Of 8 bits. With more rows x would be four times the bytes of the weights of a program; tiles read it less often.
MAX_FEW_ROWS_SCALED = 32


def product_of_16_bits(architecture: Architecture, num_tokens: int, num_weights: int) -> Product:
    """The fastest, where a row's bits may depend on its batch."""
    for up_to, (product, library_from_weights) in OWN_PRODUCTS[architecture].items():
        if num_tokens <= up_to:
            return product if num_weights < library_from_weights else Product.LIBRARY
    return Product.LIBRARY


def few_rows_launch(architecture: Architecture, weight_type: torch.dtype, num_tokens: int) -> FewRowsLaunch:
    """The first line for at least as many rows."""
    return _first_for(num_tokens, FEW_ROWS[architecture, _num_bytes(weight_type)])


def outputs_of_a_program(launch: FewRowsLaunch, num_outputs: int) -> int:
    """As many as the launch allows, but for about a program per multiprocessor, of which there are 132 or 108."""
    return min(launch.max_outputs, 16 if num_outputs < 4096 else 32 if num_outputs < 16_384 else 64)


def tiles_launch(
    architecture: Architecture, weight_type: torch.dtype, num_tokens: int, slices: int = 1, num_outputs: int = MANY
) -> TilesLaunch:
    """The first line for at least as many rows; of a router's few outputs small tiles, or few programs would run."""
    lines = TILES[architecture, _num_bytes(weight_type)] if slices == 1 else SLICED_TILES[architecture]
    return _first_for(min(num_tokens, SMALL_TILE) if num_outputs <= FEW_OUTPUTS else num_tokens, lines)


def _first_for(num_tokens: int, lines: Mapping[int, _Launch]) -> _Launch:
    return next(launch for up_to, launch in lines.items() if num_tokens <= up_to)


def _num_bytes(weight_type: torch.dtype) -> int:
    # Where kernels are interpreted, weights of 4 bytes stand for those of 2.
    return min(weight_type.itemsize, 2)

"""How products of experts are launched, by architecture, bytes per weight and slots per expert. Nothing is measured.

A step is bound by the bytes of the experts that are touched, E * (1 - (1 - k / E) ** T) of them: of Qwen3-30B-A3B, 9.4
MB each in bfloat16, 8 a layer for a token, 52 for 8 tokens, 112 for 32.

Few slots. Of a token no two experts are alike, so a program per slot reads nothing twice. With S slots at random it
reads about S / 2E more than there is, from the second level, where slots of one expert come at the same time: up to a
quarter costs less than the launch that groups slots. A warp reads 512 bytes of a row, a program 8 KiB of both gates and
ups, and six programs share a multiprocessor, with no barrier before their last sum.

Tiles. An expert of which a tile is part is read once per tile: so a tile has about as many slots as an expert on
average, and at least 16, the fewest that leave 64 outputs to a matrix instruction. Gate and up are two sums of the same
rows, each of as many outputs.
"""

import sys
from dataclasses import dataclass

import torch

from paceline_kernels.gpu.architecture import Architecture
from paceline_kernels.grouped_linear.triton.launches import GroupTilesLaunch
from paceline_kernels.linear.triton.launches import TilesLaunch


@dataclass(frozen=True, slots=True)
class FewSlotsLaunch:
    """Of `multiply_few_slots`."""

    outputs: int  # of a program, of gates as many again
    width: int  # inputs at a time
    num_warps: int


@dataclass(frozen=True, slots=True)
class ExpertsLaunch:
    """Of both products by tiles, which have the same slots."""

    gate_up: TilesLaunch
    down: TilesLaunch


MANY = sys.maxsize
SM_80, SM_90 = Architecture.SM_80, Architecture.SM_90
FEW_SLOTS = FewSlotsLaunch(8, 256, 4)
# By (architecture, bytes per weight), and by the slots per expert up to which it is expected to be the best.
TILES = {
    (SM_90, 2): {
        8: ExpertsLaunch(TilesLaunch(64, 16, 128, 4, 3), TilesLaunch(64, 16, 128, 4, 5)),
        24: ExpertsLaunch(TilesLaunch(64, 32, 128, 4, 3), TilesLaunch(64, 32, 128, 4, 4)),
        48: ExpertsLaunch(TilesLaunch(64, 64, 64, 4, 4), TilesLaunch(64, 64, 128, 4, 3)),
        MANY: ExpertsLaunch(TilesLaunch(128, 128, 64, 8, 4), TilesLaunch(128, 128, 64, 8, 4)),
    },
    (SM_90, 1): {
        8: ExpertsLaunch(TilesLaunch(64, 16, 128, 4, 5), TilesLaunch(64, 16, 128, 4, 8)),
        24: ExpertsLaunch(TilesLaunch(64, 32, 128, 4, 4), TilesLaunch(64, 32, 128, 4, 5)),
        48: ExpertsLaunch(TilesLaunch(64, 64, 64, 4, 4), TilesLaunch(64, 64, 128, 4, 4)),
        MANY: ExpertsLaunch(TilesLaunch(64, 128, 64, 8, 4), TilesLaunch(128, 128, 64, 8, 4)),
    },
    (SM_80, 2): {
        8: ExpertsLaunch(TilesLaunch(64, 16, 64, 4, 4), TilesLaunch(64, 16, 128, 4, 5)),
        24: ExpertsLaunch(TilesLaunch(64, 32, 64, 4, 4), TilesLaunch(64, 32, 128, 4, 4)),
        48: ExpertsLaunch(TilesLaunch(64, 64, 64, 8, 4), TilesLaunch(64, 64, 64, 4, 4)),
        MANY: ExpertsLaunch(TilesLaunch(64, 128, 64, 8, 3), TilesLaunch(128, 128, 64, 8, 3)),
    },
    (SM_80, 1): {
        8: ExpertsLaunch(TilesLaunch(64, 16, 128, 4, 4), TilesLaunch(64, 16, 128, 4, 6)),
        24: ExpertsLaunch(TilesLaunch(64, 32, 128, 4, 3), TilesLaunch(64, 32, 128, 4, 4)),
        48: ExpertsLaunch(TilesLaunch(64, 64, 64, 8, 4), TilesLaunch(64, 64, 128, 4, 3)),
        MANY: ExpertsLaunch(TilesLaunch(64, 128, 64, 8, 3), TilesLaunch(128, 128, 64, 8, 3)),
    },
}
# Of weights in groups, by whether both are plain: up to so many slots per expert, and for more.
FEW_SLOTS_OF_GROUPS = 8
GROUP_TILES = {
    (SM_90, True): (GroupTilesLaunch(64, 16, 4, 4), GroupTilesLaunch(64, 64, 4, 3)),
    (SM_90, False): (GroupTilesLaunch(64, 16, 4, 4), GroupTilesLaunch(64, 32, 8, 3)),
    (SM_80, True): (GroupTilesLaunch(64, 16, 4, 4), GroupTilesLaunch(64, 64, 4, 3)),
    (SM_80, False): (GroupTilesLaunch(32, 16, 4, 4), GroupTilesLaunch(64, 32, 8, 3)),
}
# The line of all batches with Splits.FIXED: its tiles take as many matrix instructions for a slot as for 64, which for
# one token of Qwen3-30B-A3B is a third of the time of its bytes.
FIXED = 48


def takes_few_slots(num_tokens: int, top_k: int, num_experts: int) -> bool:
    """Whether no tiles are made where a token's bits may depend on its batch."""
    return num_tokens == 1 or 2 * num_tokens * top_k <= num_experts


def tiles_launch(
    architecture: Architecture, weight_type: torch.dtype, num_slots: int, num_experts: int, *, is_fixed: bool
) -> ExpertsLaunch:
    """The first line for at least as many slots per expert."""
    # Where kernels are interpreted, weights of 4 bytes stand for those of 2.
    lines = TILES[architecture, min(weight_type.itemsize, 2)]
    if is_fixed:
        return lines[FIXED]
    return next(launch for up_to, launch in lines.items() if num_slots <= up_to * num_experts)


def group_tiles_launch(
    architecture: Architecture, num_slots: int, num_experts: int, *, is_plain: bool, is_fixed: bool
) -> GroupTilesLaunch:
    """Of weights in groups: the first line for at least as many slots per expert, the last one of fixed splits."""
    few, many = GROUP_TILES[architecture, is_plain]
    return many if is_fixed or num_slots > FEW_SLOTS_OF_GROUPS * num_experts else few

"""Slots, each a token's choice of an expert, put in the order of experts on a GPU, in tiles of one expert each.

What comes out has a size that does not depend on the choices, so that steps are captured. Knows slots and experts.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_BLOCK, _NUM_WARPS = 4096, 8  # slots that a program reads at a time; fewer where there are few
_FEW, _FEW_WARPS = 512, 4


@dataclass(frozen=True, slots=True)
class SlotTiles:
    """Slots of an expert follow each other, in their own order, and its last tile is filled with num_slots."""

    slots: torch.Tensor  # [max_tiles * size] int32, written up to num_tiles
    experts: torch.Tensor  # [max_tiles] int32, the same
    num_tiles: torch.Tensor  # [1] int32, on the device
    size: int  # slots of a tile

    @property
    def max_tiles(self) -> int:
        return len(self.experts)


def group(experts: torch.Tensor, num_experts: int, size: int, first_expert: int = 0) -> SlotTiles:
    """experts: [num_tokens, top_k] int32; slots are its places. Of experts there are num_experts from first_expert on,
    which tiles have as 0; slots of others are in no tile.
    """
    num_slots, device = experts.numel(), experts.device
    # Most tiles there are where as many experts as can be have one slot more than tiles that are full.
    max_tiles = (num_slots + min(num_slots, num_experts) * (size - 1)) // size
    shapes = (max_tiles * size,), (max_tiles,), (1,)
    slots, tile_experts, num_tiles = (torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes)
    is_few = num_slots <= _FEW
    group_slots[(num_experts,)](
        slots,
        tile_experts,
        num_tiles,
        experts,
        first_expert,
        num_experts,
        num_slots,
        EXPERTS=triton.next_power_of_2(num_experts),
        SIZE=size,
        BLOCK=_FEW if is_few else _BLOCK,
        num_warps=_FEW_WARPS if is_few else _NUM_WARPS,
    )
    return SlotTiles(slots, tile_experts, num_tiles, size)


@triton.jit(do_not_specialize=["first_expert", "num_slots"])
def group_slots(
    slots,  # [max_tiles * SIZE] int32
    tile_experts,  # [max_tiles] int32
    num_tiles,  # [1] int32
    experts,  # [num_slots] int32
    first_expert,
    num_experts,
    num_slots,
    EXPERTS: tl.constexpr,  # at least num_experts
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program per expert, which counts all slots and then puts down its own."""
    own, numbers, places = tl.program_id(0), tl.arange(0, EXPERTS), tl.arange(0, BLOCK)
    counts = tl.zeros([EXPERTS], tl.int32)
    for start in range(0, num_slots, BLOCK):
        chosen = tl.load(experts + start + places, mask=start + places < num_slots, other=-1) - first_expert
        counts += tl.histogram(chosen, EXPERTS, mask=(chosen >= 0) & (chosen < num_experts))
    tiles = (counts + (SIZE - 1)) // SIZE
    if own == 0:
        tl.store(num_tiles, tl.sum(tiles))
    first = tl.sum(tl.where(numbers < own, tiles, 0))
    end = first + tl.sum(tl.where(numbers == own, tiles, 0))
    for tile in range(first, end):
        tl.store(tile_experts + tile, own)
    next_slot = first * SIZE
    for start in range(0, num_slots, BLOCK):
        chosen = tl.load(experts + start + places, mask=start + places < num_slots, other=-1) - first_expert
        is_own = (chosen == own).to(tl.int32)
        tl.store(slots + next_slot + tl.cumsum(is_own) - 1, start + places, mask=is_own > 0)
        next_slot += tl.sum(is_own)
    rest = next_slot + tl.arange(0, SIZE)
    tl.store(slots + rest, tl.zeros([SIZE], tl.int32) + num_slots, mask=rest < end * SIZE)

"""Products of slots by their experts' matrices of 4 or 8 bits in groups, on a GPU: tiles as of other weights.

The matrices of all experts lie one below the other, as one. Gates and ups are summed one after the other, so that no
more is kept of a tile than its sums. Knows tiles.
"""

import torch
import triton
import triton.language as tl

from paceline_kernels.activation.gates import Gate
from paceline_kernels.activation.triton import gate_times
from paceline_kernels.experts.triton.grouping import SlotTiles
from paceline_kernels.experts.triton.tiles import place_of
from paceline_kernels.grouped_linear.triton.launches import GroupTilesLaunch
from paceline_kernels.grouped_linear.triton.planes import arguments_of
from paceline_kernels.grouped_linear.triton.tiles import sums_of_groups
from paceline_kernels.grouped_linear.weights import GroupedWeight
from paceline_kernels.linear.triton.launches import OUTPUT_TILES_TOGETHER


def launch_expert_groups(
    x: torch.Tensor,
    weight: GroupedWeight,
    tiles: SlotTiles,
    num_slots: int,
    gate: Gate | None,
    num_outputs: int,
    launch: GroupTilesLaunch,
) -> torch.Tensor:
    """As `launch_expert_tiles`: [num_slots, num_outputs]. weight: [num_experts * out, in]."""
    out = torch.empty((num_slots, num_outputs), dtype=x.dtype, device=x.device)
    multiply_expert_groups[(triton.cdiv(num_outputs, launch.outputs) * tiles.max_tiles,)](
        out,
        x,
        tile_slots=tiles.slots,
        tile_experts=tiles.experts,
        num_slot_tiles=tiles.num_tiles,
        num_slots=num_slots,
        **arguments_of(weight) | {"num_outputs": num_outputs},
        SHARING=num_slots // len(x),
        GATE=None if gate is None else gate.name,
        IS_WHOLE=weight.layout.num_inputs % weight.layout.codes.tile_inputs == 0,
        OUTPUTS=launch.outputs,
        TOKENS=tiles.size,
        TOGETHER=OUTPUT_TILES_TOGETHER,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    return out


@triton.jit(do_not_specialize=["num_slots"])
def multiply_expert_groups(
    out,  # [num_slots, num_outputs]
    x,  # [num_slots / SHARING, num_inputs]
    words,  # as in `multiply_group_tiles`, of all experts' outputs
    scales,
    zeros,
    minima,
    table,
    tile_slots,  # [max_tiles * TOKENS] int32
    tile_experts,  # [max_tiles] int32
    num_slot_tiles,  # [1] int32
    num_slots,
    num_inputs,
    num_outputs,
    num_tiles,
    num_groups,
    CODES: tl.constexpr,
    MIDDLE: tl.constexpr,
    GROUP: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    SHARING: tl.constexpr,  # slots of a row of x
    GATE: tl.constexpr,  # a Gate's name, or None
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,  # slots of a tile
    TOGETHER: tl.constexpr,
):
    """A tile of out, OUTPUTS columns of TOKENS slots; a program each."""
    if tl.program_id(0) >= (num_outputs + OUTPUTS - 1) // OUTPUTS * tl.load(num_slot_tiles):
        return
    tile, outputs, slots = place_of(tile_slots, num_slot_tiles, num_outputs, OUTPUTS, TOKENS, TOGETHER)
    output_inside, slot_inside = outputs < num_outputs, (slots < num_slots)[None, :]
    rows = tl.load(tile_experts + tile) * (num_outputs if GATE is None else 2 * num_outputs) + outputs
    sums = sums_of_groups(
        x,
        words,
        scales,
        zeros,
        minima,
        table,
        rows,
        output_inside,
        slots // SHARING,
        slot_inside,
        num_inputs,
        num_tiles,
        num_groups,
        CODES,
        MIDDLE,
        GROUP,
        IS_WHOLE,
    )
    if GATE is not None:
        ups = sums_of_groups(
            x,
            words,
            scales,
            zeros,
            minima,
            table,
            rows + num_outputs,
            output_inside,
            slots // SHARING,
            slot_inside,
            num_inputs,
            num_tiles,
            num_groups,
            CODES,
            MIDDLE,
            GROUP,
            IS_WHOLE,
        )
        sums = gate_times(sums, ups, GATE == "SILU")
    places = out + slots.to(tl.int64)[None, :] * num_outputs + outputs[:, None]
    tl.store(places, sums.to(out.dtype.element_ty), mask=output_inside[:, None] & slot_inside)

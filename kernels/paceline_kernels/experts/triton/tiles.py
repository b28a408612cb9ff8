"""Products of slots by their experts' matrices on a GPU: a program has a tile of outputs and one of an expert's slots.

As `linear.triton.tiles`, with the same promise: outputs by rows, inputs added up in ascending order by one chain of
matrix instructions. As many programs are launched as tiles there can be; those beyond the tiles there are return.
Knows tiles; which sizes are best, the launch table knows.
"""

import torch
import triton
import triton.language as tl

from paceline_kernels.activation.gates import Gate
from paceline_kernels.activation.triton import gate_times
from paceline_kernels.experts.triton.grouping import SlotTiles
from paceline_kernels.linear.triton.launches import OUTPUT_TILES_TOGETHER, TilesLaunch
from paceline_kernels.linear.triton.tiles import tile_of
from paceline_kernels.linear.triton.weights import widened


def launch_expert_tiles(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    tiles: SlotTiles,
    num_slots: int,
    gate: Gate | None,
    launch: TilesLaunch,
    slices: int = 1,
) -> torch.Tensor:
    """[slices * num_slots, out], of x's type: every slot's row of x times the transpose of its expert's matrix, scaled,
    gated; with slices a product of each part of the inputs, one below the other.

    x: [rows, in], a row for every num_slots / rows slots. weight: [num_experts, out, in], with a gate twice the
    outputs, gates first. scales: [num_experts, out], the same, float32. Slots in no tile stay unwritten.
    """
    num_outputs, num_inputs = weight.shape[1] if gate is None else weight.shape[1] // 2, weight.shape[2]
    out = torch.empty((slices * num_slots, num_outputs), dtype=x.dtype, device=x.device)
    multiply_expert_tiles[(triton.cdiv(num_outputs, launch.outputs) * tiles.max_tiles, slices)](
        out,
        x,
        weight,
        scales,
        tiles.slots,
        tiles.experts,
        tiles.num_tiles,
        num_slots,
        num_inputs,
        num_inputs // slices,
        num_outputs,
        SHARING=num_slots // len(x),
        GATE=None if gate is None else gate.name,
        WIDTH=launch.width,
        OUTPUTS=launch.outputs,
        TOKENS=tiles.size,
        TOGETHER=OUTPUT_TILES_TOGETHER,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    return out


@triton.jit(do_not_specialize=["num_slots"])
def multiply_expert_tiles(
    out,  # [slices, num_slots, num_outputs]
    x,  # [num_slots / SHARING, num_inputs]
    weight,  # [num_experts, num_outputs or with a gate twice that, num_inputs]
    scales,  # [num_experts, the same] float32, or None
    tile_slots,  # [max_tiles * TOKENS] int32
    tile_experts,  # [max_tiles] int32
    num_tiles,  # [1] int32
    num_slots,
    num_inputs,
    slice_inputs,
    num_outputs,
    SHARING: tl.constexpr,  # slots of a row of x
    GATE: tl.constexpr,  # a Gate's name, or None
    WIDTH: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,  # slots of a tile
    TOGETHER: tl.constexpr,
):
    """A tile of out, OUTPUTS columns of TOKENS slots of a slice; a program each."""
    if tl.program_id(0) >= (num_outputs + OUTPUTS - 1) // OUTPUTS * tl.load(num_tiles):
        return
    tile, outputs, slots = place_of(tile_slots, num_tiles, num_outputs, OUTPUTS, TOKENS, TOGETHER)
    inputs = tl.arange(0, WIDTH)
    output_inside, slot_inside = outputs < num_outputs, slots < num_slots
    matrix_outputs = num_outputs if GATE is None else 2 * num_outputs
    first_output = tl.load(tile_experts + tile).to(tl.int64) * matrix_outputs
    weights = weight + (first_output + outputs)[:, None] * num_inputs + inputs[None, :]
    rows = x + (slots // SHARING).to(tl.int64)[None, :] * num_inputs + inputs[:, None]
    to_up = tl.cast(num_outputs, tl.int64) * num_inputs
    sums = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    ups = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    first = tl.program_id(1) * slice_inputs
    for start in range(first, first + slice_inputs, WIDTH):
        input_inside = start + inputs < first + slice_inputs
        weight_inside = output_inside[:, None] & input_inside[None, :]
        rows_x = tl.load(rows + start, mask=slot_inside[None, :] & input_inside[:, None], other=0.0)
        w = tl.load(weights + start, mask=weight_inside, other=0.0)
        sums = tl.dot(widened(w, x.dtype.element_ty), rows_x, sums)
        if GATE is not None:
            w_up = tl.load(weights + start + to_up, mask=weight_inside, other=0.0)
            ups = tl.dot(widened(w_up, x.dtype.element_ty), rows_x, ups)
    if scales is not None:
        of_outputs = scales + first_output + outputs
        sums *= tl.load(of_outputs, mask=output_inside, other=0.0)[:, None]
        if GATE is not None:
            ups *= tl.load(of_outputs + num_outputs, mask=output_inside, other=0.0)[:, None]
    if GATE is not None:
        sums = gate_times(sums, ups, GATE == "SILU")
    rows_of_out = tl.program_id(1).to(tl.int64) * num_slots + slots
    places = out + rows_of_out[None, :] * num_outputs + outputs[:, None]
    tl.store(places, sums.to(out.dtype.element_ty), mask=output_inside[:, None] & slot_inside[None, :])


@triton.jit
def place_of(tile_slots, num_tiles, num_outputs, OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, TOGETHER: tl.constexpr):
    """(tile of slots, outputs, slots) of this program, in the order of `tile_of`."""
    output_tile, tile = tile_of(tl.program_id(0), num_outputs, tl.load(num_tiles) * TOKENS, OUTPUTS, TOKENS, TOGETHER)
    slots = tl.load(tile_slots + tile * TOKENS + tl.arange(0, TOKENS))
    return tile, output_tile * OUTPUTS + tl.arange(0, OUTPUTS), slots

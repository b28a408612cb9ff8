"""Grouped weights as numbers of 16 bits, for a library's product of many rows. Knows tiles.

A product of ours would make numbers of codes once for every tile of rows.
"""

import torch
import triton
import triton.language as tl

from paceline_kernels.grouped_linear.triton.planes import (
    TILE_WORDS,
    WORDS,
    arguments_of,
    bits_of,
    bytes_of_table,
    numbers_of_plane,
    of_spans,
)
from paceline_kernels.grouped_linear.weights import GroupedWeight

# Tiles of inputs of a program of four warps: with 4 bits a KiB of each output's numbers.
_TILES = 4


def widened(weight: GroupedWeight, dtype: torch.dtype) -> torch.Tensor:
    """The matrix [out, in], inputs in the order of the codes, computed in float32 and rounded once."""
    layout = weight.layout
    out = torch.empty((layout.num_outputs, layout.num_inputs), dtype=dtype, device=weight.words.device)
    widen_groups[(weight.words.shape[0], triton.cdiv(layout.num_tiles, _TILES))](
        out,
        **arguments_of(weight),
        TILES=_TILES,
        num_warps=4,
    )
    return out


@triton.jit
def widen_groups(
    out,  # [num_outputs, num_inputs]
    words,  # [outputs / 16, num_tiles, 16, 16]
    scales,  # [outputs / 16, num_groups, 16]
    zeros,  # the same, or None
    minima,  # the same, or None
    table,  # [16], or None
    num_inputs,
    num_outputs,
    num_tiles,
    num_groups,
    CODES: tl.constexpr,
    MIDDLE: tl.constexpr,
    GROUP: tl.constexpr,
    TILES: tl.constexpr,
):
    """TILES tiles of 16 outputs; a program each."""
    PLANES: tl.constexpr = 32 // bits_of(CODES)
    TILE: tl.constexpr = PLANES * WORDS
    SPAN: tl.constexpr = TILE if GROUP == 0 or GROUP > TILE else GROUP
    SPANS: tl.constexpr = TILE // SPAN
    of_16 = tl.program_id(0).to(tl.int64)
    outputs, within = tl.arange(0, 16), tl.arange(0, WORDS)
    tiles = tl.program_id(1) * TILES + tl.arange(0, TILES)
    output_inside = (of_16 * 16 + outputs < num_outputs)[None, :]
    places = (of_16 * num_tiles + tiles)[:, None, None] * TILE_WORDS
    places += (outputs * WORDS)[None, :, None] + within[None, None, :]
    tile = tl.load(words + places, mask=(tiles < num_tiles)[:, None, None], other=0)  # [TILES, 16, 16]
    of_groups = (of_16 * num_groups * 16 + outputs)[None, :]
    first = tiles[:, None] * TILE
    all_scales = of_spans(scales, of_groups, first, num_groups, output_inside, SPAN, SPANS, GROUP)
    all_zeros = of_spans(zeros, of_groups, first, num_groups, output_inside, SPAN, SPANS, GROUP)
    all_minima = of_spans(minima, of_groups, first, num_groups, output_inside, SPAN, SPANS, GROUP)
    rows = out + (of_16 * 16 + outputs)[None, :, None] * num_inputs
    of_table = bytes_of_table(table) if CODES == "TABLE" else None
    for plane in tl.static_range(PLANES):
        numbers = numbers_of_plane(tile, of_table, plane, CODES, MIDDLE, out.dtype.element_ty).to(tl.float32)
        if zeros is not None:
            numbers += (MIDDLE - all_zeros[plane * WORDS // SPAN].to(tl.float32))[:, :, None]
        numbers *= all_scales[plane * WORDS // SPAN].to(tl.float32)[:, :, None]
        if minima is not None:
            numbers += all_minima[plane * WORDS // SPAN].to(tl.float32)[:, :, None]
        inputs = first[:, :, None] + plane * WORDS + within[None, None, :]
        inside = output_inside[:, :, None] & (inputs < num_inputs)
        tl.store(rows + inputs, numbers.to(out.dtype.element_ty), mask=inside)

"""A product of few rows on a GPU with grouped weights: words are streamed once, past rows that fit into one tile.

As `linear.triton.few_rows`: outputs by rows, a slice of the inputs for each warp, sums folded in order at the end.
Knows programs; which sizes are best, the launch table knows.
"""

import torch
import triton
import triton.language as tl

from paceline_kernels.grouped_linear.triton.launches import FewGroupsLaunch
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
from paceline_kernels.linear.triton.weights import store_products

_MIN_TILE_TOKENS = 8  # the columns of a matrix instruction


def launch_few_rows(
    x: torch.Tensor, weight: GroupedWeight, bias: torch.Tensor | None, launch: FewGroupsLaunch
) -> torch.Tensor:
    """x [num_tokens, in] times the transpose of weight [out, in], plus the bias: [num_tokens, out]."""
    num_tokens, layout = x.shape[0], weight.layout
    out = torch.empty((num_tokens, layout.num_outputs), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    multiply_few_groups[(triton.cdiv(layout.num_outputs, launch.outputs),)](
        out,
        x,
        bias=bias,
        num_tokens=num_tokens,
        **arguments_of(weight),
        IS_WHOLE=layout.num_inputs % layout.codes.tile_inputs == 0,
        SLICES=launch.slices,
        OUTPUTS=launch.outputs,
        TOKENS=max(_MIN_TILE_TOKENS, triton.next_power_of_2(num_tokens)),
        num_warps=launch.slices,
        num_stages=launch.steps + 1,
        maxnreg=launch.registers,
    )
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def multiply_few_groups(
    out,  # [num_tokens, num_outputs]
    x,  # [num_tokens, num_inputs]
    words,  # [outputs / 16, num_tiles, 16, 16]
    scales,  # [outputs / 16, num_groups, 16]
    zeros,  # the same, or None
    minima,  # the same, or None
    table,  # [16], or None
    bias,  # [num_outputs], or None
    num_tokens,
    num_inputs,
    num_outputs,
    num_tiles,
    num_groups,
    CODES: tl.constexpr,
    MIDDLE: tl.constexpr,
    GROUP: tl.constexpr,
    IS_WHOLE: tl.constexpr,  # whether the last tile of a row is
    SLICES: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,  # at least num_tokens
):
    """OUTPUTS columns of out; a program each."""
    PLANES: tl.constexpr = 32 // bits_of(CODES)
    TILE: tl.constexpr = PLANES * WORDS
    SPAN: tl.constexpr = TILE if GROUP == 0 or GROUP > TILE else GROUP
    SPANS: tl.constexpr = TILE // SPAN
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    tokens, slices, within = tl.arange(0, TOKENS), tl.arange(0, SLICES), tl.arange(0, WORDS)
    output_inside = (outputs < num_outputs)[None, :]
    token_inside = (tokens < num_tokens)[None, None, :]
    of_tiles = words + (outputs // 16).to(tl.int64)[None, :, None] * num_tiles * TILE_WORDS
    of_tiles += (slices * TILE_WORDS)[:, None, None] + (outputs % 16 * WORDS)[None, :, None] + within[None, None, :]
    x_inputs = (slices * TILE)[:, None, None] + within[None, :, None]
    rows = x + (tokens[None, None, :] * num_inputs + x_inputs)  # [SLICES, 16, TOKENS]
    of_groups = (outputs // 16 * num_groups * 16 + outputs % 16)[None, :]
    ones = tl.full([SLICES, OUTPUTS, WORDS], 1.0, x.dtype.element_ty)
    sums = tl.zeros([SLICES, OUTPUTS, TOKENS], tl.float32)
    first = slices[:, None] * TILE
    scales_next = of_spans(scales, of_groups, first, num_groups, output_inside, SPAN, SPANS, GROUP)
    zeros_next = of_spans(zeros, of_groups, first, num_groups, output_inside, SPAN, SPANS, GROUP)
    minima_next = of_spans(minima, of_groups, first, num_groups, output_inside, SPAN, SPANS, GROUP)
    of_table = bytes_of_table(table) if CODES == "TABLE" else None
    for start in range(0, num_tiles, SLICES):
        scales_now, zeros_now, minima_now = scales_next, zeros_next, minima_next
        first = (start + SLICES + slices)[:, None] * TILE
        scales_next = of_spans(scales, of_groups, first, num_groups, output_inside, SPAN, SPANS, GROUP)
        zeros_next = of_spans(zeros, of_groups, first, num_groups, output_inside, SPAN, SPANS, GROUP)
        minima_next = of_spans(minima, of_groups, first, num_groups, output_inside, SPAN, SPANS, GROUP)
        inside = (start + slices < num_tiles)[:, None, None]
        tile = tl.load(of_tiles + start * TILE_WORDS, mask=inside & output_inside[:, :, None], other=0)
        for span in tl.static_range(SPANS):
            part = tl.zeros([SLICES, OUTPUTS, TOKENS], tl.float32)
            of_x = tl.zeros([SLICES, OUTPUTS, TOKENS], tl.float32)
            for plane in tl.static_range(span * SPAN // WORDS, (span + 1) * SPAN // WORDS):
                plane_input = start * TILE + plane * WORDS
                x_inside = inside if IS_WHOLE else plane_input + x_inputs < num_inputs
                rows_x = tl.load(rows + plane_input, mask=token_inside & x_inside, other=0.0)
                if zeros is not None or minima is not None:
                    of_x = tl.dot(ones, rows_x, of_x)
                part = tl.dot(numbers_of_plane(tile, of_table, plane, CODES, MIDDLE, x.dtype.element_ty), rows_x, part)
            if zeros is not None:
                part += (MIDDLE - zeros_now[span].to(tl.float32))[:, :, None] * of_x
            sums += part * scales_now[span].to(tl.float32)[:, :, None]
            if minima is not None:
                sums += of_x * minima_now[span].to(tl.float32)[:, :, None]
    store_products(out, tl.sum(sums, 0), None, bias, outputs, tokens, num_outputs, num_tokens)

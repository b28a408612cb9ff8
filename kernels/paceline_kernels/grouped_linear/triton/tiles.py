"""A product of some hundred rows on a GPU with grouped weights, and the one whose bits do not depend on the batch.

As `linear.triton.tiles`: a program has a tile of outputs and rows and adds up all groups in ascending order, each by
one chain of matrix instructions, whatever the tile's size. Knows tiles; which sizes are best, the launch table knows.
"""

import torch
import triton
import triton.language as tl

from paceline_kernels.gpu import architecture
from paceline_kernels.grouped_linear.triton.launches import tiles_launch
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
from paceline_kernels.linear.triton.launches import OUTPUT_TILES_TOGETHER
from paceline_kernels.linear.triton.tiles import tile_of
from paceline_kernels.linear.triton.weights import store_products


def launch_tiles(x: torch.Tensor, weight: GroupedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x [num_tokens, in] times the transpose of weight [out, in], plus the bias: [num_tokens, out]."""
    num_tokens, layout = x.shape[0], weight.layout
    out = torch.empty((num_tokens, layout.num_outputs), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    launch = tiles_launch(architecture.current(), num_tokens, is_plain=weight.is_plain)
    grid = (triton.cdiv(layout.num_outputs, launch.outputs) * triton.cdiv(num_tokens, launch.tokens),)
    multiply_group_tiles[grid](
        out,
        x,
        bias=bias,
        num_tokens=num_tokens,
        **arguments_of(weight),
        IS_WHOLE=layout.num_inputs % layout.codes.tile_inputs == 0,
        OUTPUTS=launch.outputs,
        TOKENS=launch.tokens,
        TOGETHER=OUTPUT_TILES_TOGETHER,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def multiply_group_tiles(
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
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """A tile of out, OUTPUTS columns by TOKENS rows; a program each."""
    output_tile, token_tile = tile_of(tl.program_id(0), num_outputs, num_tokens, OUTPUTS, TOKENS, TOGETHER)
    outputs = output_tile * OUTPUTS + tl.arange(0, OUTPUTS)
    tokens = token_tile * TOKENS + tl.arange(0, TOKENS)
    sums = sums_of_groups(
        x,
        words,
        scales,
        zeros,
        minima,
        table,
        outputs,
        outputs < num_outputs,
        tokens,
        (tokens < num_tokens)[None, :],
        num_inputs,
        num_tiles,
        num_groups,
        CODES,
        MIDDLE,
        GROUP,
        IS_WHOLE,
    )
    store_products(out, sums, None, bias, outputs, tokens, num_outputs, num_tokens)


@triton.jit
def sums_of_groups(
    x,
    words,
    scales,
    zeros,
    minima,
    table,
    outputs,  # [OUTPUTS]
    output_inside,  # [OUTPUTS]
    x_rows,  # [TOKENS]
    token_inside,  # [1, TOKENS]
    num_inputs,
    num_tiles,
    num_groups,
    CODES: tl.constexpr,
    MIDDLE: tl.constexpr,
    GROUP: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """[OUTPUTS, TOKENS]: some rows of the matrix times some of x; the rest as above."""
    OUTPUTS: tl.constexpr = outputs.shape[0]
    TOKENS: tl.constexpr = x_rows.shape[0]
    PLANES: tl.constexpr = 32 // bits_of(CODES)
    TILE: tl.constexpr = PLANES * WORDS
    SPAN: tl.constexpr = TILE if GROUP == 0 or GROUP > TILE else GROUP
    SPANS: tl.constexpr = TILE // SPAN
    within = tl.arange(0, WORDS)
    of_tiles = words + (outputs // 16).to(tl.int64)[:, None] * num_tiles * TILE_WORDS
    of_tiles += (outputs % 16 * WORDS)[:, None] + within[None, :]
    rows = x + x_rows.to(tl.int64)[None, :] * num_inputs + within[:, None]  # [16, TOKENS]
    of_groups = outputs // 16 * num_groups * 16 + outputs % 16
    ones = tl.full([OUTPUTS, WORDS], 1.0, x.dtype.element_ty)
    sums = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    scales_next = of_spans(scales, of_groups, 0, num_groups, output_inside, SPAN, SPANS, GROUP)
    zeros_next = of_spans(zeros, of_groups, 0, num_groups, output_inside, SPAN, SPANS, GROUP)
    minima_next = of_spans(minima, of_groups, 0, num_groups, output_inside, SPAN, SPANS, GROUP)
    of_table = bytes_of_table(table) if CODES == "TABLE" else None
    for number in range(num_tiles):
        scales_now, zeros_now, minima_now = scales_next, zeros_next, minima_next
        first = (number + 1) * TILE
        scales_next = of_spans(scales, of_groups, first, num_groups, output_inside, SPAN, SPANS, GROUP)
        zeros_next = of_spans(zeros, of_groups, first, num_groups, output_inside, SPAN, SPANS, GROUP)
        minima_next = of_spans(minima, of_groups, first, num_groups, output_inside, SPAN, SPANS, GROUP)
        tile = tl.load(of_tiles + number * TILE_WORDS, mask=output_inside[:, None], other=0)
        for span in tl.static_range(SPANS):
            part = tl.zeros([OUTPUTS, TOKENS], tl.float32)
            of_x = tl.zeros([OUTPUTS, TOKENS], tl.float32)
            for plane in tl.static_range(span * SPAN // WORDS, (span + 1) * SPAN // WORDS):
                start = number * TILE + plane * WORDS
                inside = token_inside if IS_WHOLE else token_inside & (start + within < num_inputs)[:, None]
                rows_x = tl.load(rows + start, mask=inside, other=0.0)
                if zeros is not None or minima is not None:
                    of_x = tl.dot(ones, rows_x, of_x)
                part = tl.dot(numbers_of_plane(tile, of_table, plane, CODES, MIDDLE, x.dtype.element_ty), rows_x, part)
            if zeros is not None:
                part += (MIDDLE - zeros_now[span].to(tl.float32))[:, None] * of_x
            sums += part * scales_now[span].to(tl.float32)[:, None]
            if minima is not None:
                sums += of_x * minima_now[span].to(tl.float32)[:, None]
    return sums

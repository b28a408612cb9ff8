"""A matrix product of many rows on a GPU with weights of any type, and the one whose bits do not depend on the batch.

A program has a tile of outputs and rows, and adds up all inputs in ascending order: one chain of matrix instructions,
whatever the tile's size, so that a row's sums have the same order in every batch. Products are computed transposed,
because matrix instructions take their first operand from registers, where weights of 8 bits are widened. Where x is of
8 bits, too, nothing is widened, and whole numbers are summed.

Knows tiles; which sizes are best, the launch table knows.
"""

import torch
import triton
import triton.language as tl

from paceline_kernels.gpu import architecture
from paceline_kernels.gpu.rounded_rows import RoundedRows
from paceline_kernels.linear.triton.launches import OUTPUT_TILES_TOGETHER, ROUNDED_TILES, tiles_launch
from paceline_kernels.linear.triton.weights import store_products, widened


def launch_tiles(
    x: torch.Tensor | RoundedRows, weight: torch.Tensor, scales: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """x [num_tokens, in] times the transpose of weight [out, in], scaled, plus the bias: [num_tokens, out].

    Rounded rows are int8, as is the weight then.
    """
    rows, row_scales = (x.numbers, x.scales) if isinstance(x, RoundedRows) else (x, None)
    num_tokens, num_outputs = rows.shape[0], weight.shape[0]
    out = torch.empty((num_tokens, num_outputs), dtype=x.dtype, device=rows.device)
    if not out.numel():
        return out
    launch = tiles_launch(architecture.current(), weight.dtype, num_tokens) if row_scales is None else ROUNDED_TILES
    grid = (triton.cdiv(num_outputs, launch.outputs) * triton.cdiv(num_tokens, launch.tokens),)
    multiply_tiles[grid](
        out,
        rows,
        weight,
        scales,
        bias,
        row_scales,
        num_tokens,
        weight.shape[1],
        num_outputs,
        WIDTH=launch.width,
        OUTPUTS=launch.outputs,
        TOKENS=launch.tokens,
        TOGETHER=OUTPUT_TILES_TOGETHER,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def multiply_tiles(
    out,  # [num_tokens, num_outputs]
    x,  # [num_tokens, num_inputs]
    weight,  # [num_outputs, num_inputs]
    scales,  # [num_outputs] float32, or None
    bias,  # [num_outputs], or None
    row_scales,  # [num_tokens] float32, or None
    num_tokens,
    num_inputs,
    num_outputs,
    WIDTH: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """A tile of out, OUTPUTS columns by TOKENS rows; a program each."""
    output_tile, token_tile = tile_of(tl.program_id(0), num_outputs, num_tokens, OUTPUTS, TOKENS, TOGETHER)
    outputs = output_tile * OUTPUTS + tl.arange(0, OUTPUTS)
    tokens = token_tile * TOKENS + tl.arange(0, TOKENS)
    inputs = tl.arange(0, WIDTH)
    weights = weight + outputs.to(tl.int64)[:, None] * num_inputs + inputs[None, :]
    rows = x + tokens.to(tl.int64)[None, :] * num_inputs + inputs[:, None]
    output_inside, token_inside = (outputs < num_outputs)[:, None], (tokens < num_tokens)[None, :]
    sums = tl.zeros([OUTPUTS, TOKENS], tl.float32 if row_scales is None else tl.int32)
    for start in range(0, num_inputs, WIDTH):
        inside = start + inputs < num_inputs
        w = tl.load(weights + start, mask=output_inside & inside[None, :], other=0.0)
        rows_x = tl.load(rows + start, mask=token_inside & inside[:, None], other=0.0)
        if row_scales is None:
            sums = tl.dot(widened(w, x.dtype.element_ty), rows_x, sums)
        else:
            sums = tl.dot(w, rows_x, sums, out_dtype=tl.int32)
    if row_scales is not None:
        sums = sums.to(tl.float32) * tl.load(row_scales + tokens, mask=tokens < num_tokens, other=0.0)[None, :]
    store_products(out, sums, scales, bias, outputs, tokens, num_outputs, num_tokens)


@triton.jit
def tile_of(
    program,
    num_outputs,
    num_tokens,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """(tile of outputs, tile of tokens) of a program: TOGETHER tiles of outputs see all tokens before the next do.

    Programs that run at the same time then share weights and rows in the second level.
    """
    output_tiles = (num_outputs + OUTPUTS - 1) // OUTPUTS
    token_tiles = (num_tokens + TOKENS - 1) // TOKENS
    first = program // (TOGETHER * token_tiles) * TOGETHER
    together = tl.minimum(output_tiles - first, TOGETHER)
    within = program % (TOGETHER * token_tiles)
    return first + within % together, within // together

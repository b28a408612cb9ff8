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
from paceline_kernels.linear.triton.slices import with_neighbours, with_those_left
from paceline_kernels.linear.triton.weights import store_products, widened


def launch_tiles(
    x: torch.Tensor | RoundedRows,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    slices: int = 1,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [num_tokens, in] times the transpose of weight [out, in], scaled, plus the bias: [num_tokens, out].

    Rounded rows are int8, as is the weight then. slices: of the inputs. dtype: of the result, else that of x.
    """
    rows, row_scales = (x.numbers, x.scales) if isinstance(x, RoundedRows) else (x, None)
    num_tokens, num_outputs = rows.shape[0], weight.shape[0]
    out = torch.empty((num_tokens, num_outputs), dtype=dtype or x.dtype, device=rows.device)
    if not out.numel():
        return out
    launch = ROUNDED_TILES
    if row_scales is None:
        launch = tiles_launch(architecture.current(), weight.dtype, num_tokens, slices, num_outputs)
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
        SLICES=slices,
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
    SLICES: tl.constexpr,  # of the inputs, up to 8
    WIDTH: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """A tile of out, OUTPUTS columns by TOKENS rows; a program each. Slices' sums are added as `sum_of_slices` does."""
    output_tile, token_tile = tile_of(tl.program_id(0), num_outputs, num_tokens, OUTPUTS, TOKENS, TOGETHER)
    outputs = output_tile * OUTPUTS + tl.arange(0, OUTPUTS)
    tokens = token_tile * TOKENS + tl.arange(0, TOKENS)
    inputs = tl.arange(0, WIDTH)
    weights = weight + outputs.to(tl.int64)[:, None] * num_inputs + inputs[None, :]
    rows = x + tokens.to(tl.int64)[None, :] * num_inputs + inputs[:, None]
    output_inside, token_inside = (outputs < num_outputs)[:, None], (tokens < num_tokens)[None, :]
    none = tl.zeros([OUTPUTS, TOKENS], tl.float32 if row_scales is None else tl.int32)
    sums, of_one, of_two, of_four = none, none, none, none  # the latter wait for a neighbour
    length = num_inputs // SLICES
    for number in range(SLICES):
        sums = none
        end = (number + 1) * length
        for start in range(number * length, end, WIDTH):
            inside = start + inputs < end
            w = tl.load(weights + start, mask=output_inside & inside[None, :], other=0.0)
            rows_x = tl.load(rows + start, mask=token_inside & inside[:, None], other=0.0)
            if row_scales is None:
                sums = tl.dot(widened(w, x.dtype.element_ty), rows_x, sums)
            else:
                sums = tl.dot(w, rows_x, sums, out_dtype=tl.int32)
        if SLICES > 1:
            sums, of_one, of_two, of_four = with_neighbours(number, sums, of_one, of_two, of_four)
    sums = with_those_left(sums, of_two, of_four, SLICES)
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

"""A matrix product of few rows on a GPU: weights are streamed once, past rows that fit into one tile.

Products are computed transposed, outputs by rows, so that weights fill the 16 rows of a matrix instruction and the rows
of x are its few columns. A program has some outputs and all inputs; each of its warps has a slice of the inputs of a
step, as one matrix of a batch of products, and what the warps have summed is folded in order at the end. So sums are
split as many ways as there are warps, without a launch or a word of memory for it, and no warp waits for the sum of its
last instruction alone.

Knows tiles; which sizes are best, the launch table knows.
"""

import torch
import triton
import triton.language as tl

from paceline_kernels.gpu import architecture
from paceline_kernels.linear.triton.launches import few_rows_launch, outputs_of_a_program
from paceline_kernels.linear.triton.weights import store_products, widened

_MIN_TILE_TOKENS = 8  # the columns of a matrix instruction


def launch_few_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [num_tokens, in] times the transpose of weight [out, in], scaled, plus the bias: [num_tokens, out].

    dtype: of the result, else that of x.
    """
    num_tokens, num_outputs = x.shape[0], weight.shape[0]
    out = torch.empty((num_tokens, num_outputs), dtype=dtype or x.dtype, device=x.device)
    if not out.numel():
        return out
    launch = few_rows_launch(architecture.current(), weight.dtype, num_tokens)
    outputs = outputs_of_a_program(launch, num_outputs)
    tile_tokens = max(_MIN_TILE_TOKENS, triton.next_power_of_2(num_tokens))
    step_bytes = launch.slices * launch.width * (outputs * weight.element_size() + tile_tokens * x.element_size())
    steps = max(2, min(launch.max_steps, launch.shared_bytes // step_bytes))
    multiply_few_rows[(triton.cdiv(num_outputs, outputs),)](
        out,
        x,
        weight,
        scales,
        bias,
        num_tokens,
        weight.shape[1],
        num_outputs,
        SLICES=launch.slices,
        WIDTH=launch.width,
        OUTPUTS=outputs,
        TOKENS=tile_tokens,
        num_warps=launch.slices,
        num_stages=steps + 1,
    )
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def multiply_few_rows(
    out,  # [num_tokens, num_outputs]
    x,  # [num_tokens, num_inputs]
    weight,  # [num_outputs, num_inputs]
    scales,  # [num_outputs] float32, or None
    bias,  # [num_outputs], or None
    num_tokens,
    num_inputs,
    num_outputs,
    SLICES: tl.constexpr,
    WIDTH: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,  # at least num_tokens
):
    """OUTPUTS columns of out; a program each."""
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    tokens = tl.arange(0, TOKENS)
    slices, within = tl.arange(0, SLICES) * WIDTH, tl.arange(0, WIDTH)
    weight_inputs = slices[:, None, None] + within[None, None, :]
    x_inputs = slices[:, None, None] + within[None, :, None]
    weights = weight + outputs.to(tl.int64)[None, :, None] * num_inputs + weight_inputs  # [SLICES, OUTPUTS, WIDTH]
    rows = x + tokens.to(tl.int64)[None, None, :] * num_inputs + x_inputs  # [SLICES, WIDTH, TOKENS]
    output_inside = (outputs < num_outputs)[None, :, None]
    token_inside = (tokens < num_tokens)[None, None, :]
    sums = tl.zeros([SLICES, OUTPUTS, TOKENS], tl.float32)
    for start in range(0, num_inputs, SLICES * WIDTH):
        w = tl.load(weights + start, mask=output_inside & (start + weight_inputs < num_inputs), other=0.0)
        rows_x = tl.load(rows + start, mask=token_inside & (start + x_inputs < num_inputs), other=0.0)
        sums = tl.dot(widened(w, x.dtype.element_ty), rows_x, sums)
    store_products(out, tl.sum(sums, 0), scales, bias, outputs, tokens, num_outputs, num_tokens)

"""rms_norm for GPUs: a row, or a head, stays in the registers of one program from its reading to its writing.

A program's sum has one order that depends on the width alone, so all is batch-invariant. Knows rows; not who asked.
"""

import torch
import triton
import triton.language as tl

from paceline_kernels.errors import KernelArgumentError
from paceline_kernels.gpu import architecture
from paceline_kernels.gpu.architecture import Architecture
from paceline_kernels.gpu.rounded_rows import RoundedRows
from paceline_kernels.gpu.triton import largest_bits, rounded, scale_row

# Warps per row, by the largest width they serve: 32 numbers per thread, four 16-byte loads of 16-bit numbers from each
# of input, residual and weight. A row moves 8 bytes per number (input, residual twice, output), so 4,096 rows of 4,096
# are 134 MB: 31 us at the 4.3 TB/s that a copy reaches on an H200.
NUM_WARPS = {
    Architecture.SM_80: {1024: 1, 2048: 2, 4096: 4, 8192: 8, 16384: 16},
    Architecture.SM_90: {1024: 1, 2048: 2, 4096: 4, 8192: 8, 16384: 16},
}
# Heads by one program of four warps: with 128 dimensions 16 numbers per thread.
HEADS_PER_PROGRAM = {Architecture.SM_80: 16, Architecture.SM_90: 16}
_HEADS_WARPS = 4


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    rounded_rows: RoundedRows | None = None,
) -> torch.Tensor:
    """See `paceline_kernels.rms_norm.rms_norm`; the sum is rounded to the residual's type before it is normalised.

    Returns the numbers of rounded_rows, which are written then.
    """
    num_tokens, hidden = x.shape
    warps = NUM_WARPS[architecture.current()]
    if hidden > max(warps):
        raise KernelArgumentError("rms_norm", f"hidden must be at most {max(warps)} on a GPU, not {hidden}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if rounded_rows is None else rounded_rows.numbers
    scales = None if rounded_rows is None else rounded_rows.scales
    if num_tokens:
        num_warps = next(warps[limit] for limit in sorted(warps) if hidden <= limit)
        block = triton.next_power_of_2(hidden)
        rms_norm_kernel[(num_tokens,)](x, residual, weight, out, scales, eps, hidden, block, num_warps=num_warps)
    return out


def rms_norm_heads(
    qkv: torch.Tensor, query_weight: torch.Tensor, key_weight: torch.Tensor, num_kv_heads: int, eps: float
) -> None:
    num_tokens, all_heads, head_dim = qkv.shape
    if not num_tokens:
        return
    num_heads = all_heads - 2 * num_kv_heads
    per_program = HEADS_PER_PROGRAM[architecture.current()]
    grid = (num_tokens, triton.cdiv(num_heads + num_kv_heads, per_program))
    sizes = (num_heads, num_kv_heads, head_dim, triton.next_power_of_2(head_dim), per_program)
    rms_norm_heads_kernel[grid](qkv, query_weight, key_weight, eps, *sizes, num_warps=_HEADS_WARPS)


@triton.jit
def rms_norm_kernel(x, residual, weight, out, scales, eps, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """A program per row. x, residual (or None), out: [rows, HIDDEN]; weight: [HIDDEN]; scales: [rows] of out, or None.

    With scales what would be written is rounded once more.
    """
    row = tl.program_id(0).to(tl.int64) * HIDDEN
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    gains = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(x + row + columns, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        total = values + tl.load(residual + row + columns, mask=inside, other=0.0).to(tl.float32)
        kept = total.to(residual.dtype.element_ty)
        tl.store(residual + row + columns, kept, mask=inside)
        values = kept.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values) / HIDDEN + eps)
    normed = (gains * (values * scale)).to(x.dtype.element_ty)
    if scales is not None:
        numbers = normed.to(tl.float32)
        factor = scale_row(largest_bits(numbers), scales, tl.program_id(0), out.dtype.element_ty)
        normed = rounded(numbers, factor, out.dtype.element_ty)
    tl.store(out + row + columns, normed, mask=inside)


@triton.jit
def rms_norm_heads_kernel(
    qkv,
    query_weight,
    key_weight,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr,
):
    """A program per token and HEADS_PER_PROGRAM heads. qkv: [tokens, HEADS + 2 * KV_HEADS, HEAD_DIM]."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS_PER_PROGRAM + tl.arange(0, HEADS_PER_PROGRAM)[:, None]
    dims = tl.arange(0, BLOCK)[None, :]
    inside = (heads < HEADS + KV_HEADS) & (dims < HEAD_DIM)
    pointers = qkv + token * ((HEADS + 2 * KV_HEADS) * HEAD_DIM) + heads * HEAD_DIM + dims
    of_query = tl.load(query_weight + dims, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
    of_key = tl.load(key_weight + dims, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
    values = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    scales = tl.rsqrt(tl.sum(values * values, axis=1) / HEAD_DIM + eps)
    gains = tl.where(heads < HEADS, of_query, of_key)
    tl.store(pointers, (gains * (values * scales[:, None])).to(qkv.dtype.element_ty), mask=inside)

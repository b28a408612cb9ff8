"""take_rows for GPUs. Knows indices, which it can only check where they are used: one that names no row gives NaN."""

import torch
import triton
import triton.language as tl

from paceline_kernels.gpu import architecture
from paceline_kernels.gpu.architecture import Architecture

# Numbers per program of four warps: two 16-byte loads of 16-bit numbers per thread.
BLOCK = {Architecture.SM_80: 2048, Architecture.SM_90: 2048}
_NUM_WARPS = 4


def take_rows(table: torch.Tensor, indices: torch.Tensor, scale: float) -> torch.Tensor:
    num_rows, width = table.shape
    out = torch.empty((indices.shape[0], width), dtype=table.dtype, device=table.device)
    if out.numel():
        block = BLOCK[architecture.current()]
        grid = (indices.shape[0], triton.cdiv(width, block))
        take_rows_kernel[grid](table, indices, out, float(scale), num_rows, width, block, num_warps=_NUM_WARPS)
    return out


# Hidden states are taken out of as many rows as a step has tokens: another number must not be another compilation.
@triton.jit(do_not_specialize=["num_rows"])
def take_rows_kernel(table, indices, out, scale, num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A program per index and BLOCK columns. table: [num_rows, WIDTH]; out: [indices, WIDTH]."""
    place = tl.program_id(0).to(tl.int64)
    index = tl.load(indices + place).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    exists = (index >= 0) & (index < num_rows)
    values = tl.load(table + index * WIDTH + columns, mask=inside & exists, other=float("nan")).to(tl.float32)
    tl.store(out + place * WIDTH + columns, (values * scale).to(out.dtype.element_ty), mask=inside)

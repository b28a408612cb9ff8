"""activation for GPUs: element by element, each read once and written once. Knows rows; not what made them."""

import torch
import triton
import triton.language as tl

from paceline_kernels.activation.gates import Gate
from paceline_kernels.gpu import architecture
from paceline_kernels.gpu.architecture import Architecture

# Numbers per program of four warps: one 16-byte load of 16-bit numbers per thread and input. What a program waits for
# is hidden by the 16 others of its multiprocessor, together 64 kB in flight where 35 kB saturate an H200's memory.
BLOCK = {Architecture.SM_80: 1024, Architecture.SM_90: 1024}
_NUM_WARPS = 4


def gate_and_multiply(gate_up: torch.Tensor, gate: int) -> torch.Tensor:
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        block = BLOCK[architecture.current()]
        grid = (num_tokens, triton.cdiv(width, block))
        gate_and_multiply_kernel[grid](gate_up, out, width, gate == Gate.SILU, block, num_warps=_NUM_WARPS)
    return out


def softcap(x: torch.Tensor, cap: float) -> None:
    if x.numel():
        block = BLOCK[architecture.current()]
        grid = (x.shape[0], triton.cdiv(x.shape[1], block))
        softcap_kernel[grid](x, cap, x.shape[1], block, num_warps=_NUM_WARPS)


@triton.jit
def gate_and_multiply_kernel(gate_up, out, WIDTH: tl.constexpr, IS_SILU: tl.constexpr, BLOCK: tl.constexpr):
    """A program per row and BLOCK columns. gate_up: [rows, 2 * WIDTH]; out: [rows, WIDTH]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    gates = gate_up + row * (2 * WIDTH) + columns
    gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gates + WIDTH, mask=inside, other=0.0).to(tl.float32)
    if IS_SILU:
        argument = gate
    else:  # GELU with its tanh written as an exponential: 2 * sqrt(2 / pi) * (gate + 0.044715 * gate**3)
        argument = gate * (1.5957691216057308 + 0.07135481282656515 * (gate * gate))
    tl.store(out + row * WIDTH + columns, (gate / (1.0 + tl.exp(-argument)) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def softcap_kernel(x, cap, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A program per row and BLOCK columns of x [rows, WIDTH], in place."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    pointers = x + row * WIDTH + columns
    capped = cap * tanh(tl.load(pointers, mask=inside, other=0.0).to(tl.float32) / cap)
    tl.store(pointers, capped.to(x.dtype.element_ty), mask=inside)


@triton.jit
def tanh(x):
    """To 1e-6 relative: below 1/4 by a series, because 1 - exp(-2x) has lost too many digits there."""
    square = x * x
    small = x * (1.0 + square * (-0.3333333333333333 + square * (0.13333333333333333 - square * 0.05396825396825397)))
    falling = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - falling) / (1.0 + falling)
    return tl.where(tl.abs(x) < 0.25, small, tl.where(x < 0.0, -large, large))

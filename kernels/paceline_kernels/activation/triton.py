"""activation for GPUs: element by element, each read once and written once. Knows rows; not what made them."""

import torch
import triton
import triton.language as tl

from paceline_kernels.activation.gates import Gate
from paceline_kernels.gpu import architecture
from paceline_kernels.gpu.architecture import Architecture
from paceline_kernels.gpu.rounded_rows import RoundedRows, unwritten_rows
from paceline_kernels.gpu.triton import largest_bits, rounded, scale_row

# Numbers per program of four warps: one 16-byte load of 16-bit numbers per thread and input. What a program waits for
# is hidden by the 16 others of its multiprocessor, together 64 kB in flight where 35 kB saturate an H200's memory.
BLOCK = {Architecture.SM_80: 1024, Architecture.SM_90: 1024}
_NUM_WARPS = 4
# Of a program that rounds a row, which it reads twice: four of them share a multiprocessor, so that rows of 14,336
# gates are still in the second level, 30 of its 50 MB.
_ROW_BLOCK, _ROW_WARPS = 8192, 16


def gate_and_multiply(gate_up: torch.Tensor, gate: int) -> torch.Tensor:
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        block = BLOCK[architecture.current()]
        grid = (num_tokens, triton.cdiv(width, block))
        gate_and_multiply_kernel[grid](gate_up, out, width, gate == Gate.SILU, block, num_warps=_NUM_WARPS)
    return out


def gate_and_multiply_rounded(gate_up: torch.Tensor, gate: int, rounded_to: torch.dtype) -> RoundedRows:
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = unwritten_rows(gate_up, width, rounded_to)
    if num_tokens:
        is_silu, block = gate == Gate.SILU, min(_ROW_BLOCK, triton.next_power_of_2(width))
        gate_and_round_kernel[(num_tokens,)](
            gate_up, out.numbers, out.scales, width, is_silu, block, num_warps=_ROW_WARPS
        )
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
    numbers = gated(gate_up + row * (2 * WIDTH), columns, WIDTH, IS_SILU)
    tl.store(out + row * WIDTH + columns, numbers, mask=columns < WIDTH)


@triton.jit
def gate_and_round_kernel(gate_up, out, scales, WIDTH: tl.constexpr, IS_SILU: tl.constexpr, BLOCK: tl.constexpr):
    """A program per row. gate_up: [rows, 2 * WIDTH]; out: [rows, WIDTH] of 8 bits; scales: [rows]."""
    row = tl.program_id(0).to(tl.int64)
    TYPE: tl.constexpr = out.dtype.element_ty
    bits = 0
    for start in range(0, WIDTH, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        numbers = gated(gate_up + row * (2 * WIDTH), columns, WIDTH, IS_SILU).to(tl.float32)
        bits = tl.maximum(bits, largest_bits(numbers))
    factor = scale_row(bits, scales, row, TYPE)
    for start in range(0, WIDTH, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        numbers = gated(gate_up + row * (2 * WIDTH), columns, WIDTH, IS_SILU).to(tl.float32)
        tl.store(out + row * WIDTH + columns, rounded(numbers, factor, TYPE), mask=columns < WIDTH)


@triton.jit
def gated(row, columns, WIDTH: tl.constexpr, IS_SILU: tl.constexpr):
    """Some columns of a row of gate(gates) * up, in the row's type; 0 beyond its end."""
    inside = columns < WIDTH
    gates = row + columns
    gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gates + WIDTH, mask=inside, other=0.0).to(tl.float32)
    return gate_times(gate, up, IS_SILU).to(row.dtype.element_ty)


@triton.jit
def gate_times(gate, up, IS_SILU: tl.constexpr):
    """gate(gate) * up, of float32."""
    if IS_SILU:
        argument = gate
    else:  # GELU with its tanh written as an exponential: 2 * sqrt(2 / pi) * (gate + 0.044715 * gate**3)
        argument = gate * (1.5957691216057308 + 0.07135481282656515 * (gate * gate))
    return gate / (1.0 + tl.exp(-argument)) * up


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

"""Products of few slots by their experts' matrices on a GPU: none waits for others to be grouped.

A program has some outputs of a slot. It reads rows of weights straight into registers and multiplies there, as matrix
instructions would be empty but for a column. Programs of one output block follow each other, so that slots of one
expert find its weights in the second level. Knows programs; which sizes are best, the launch table knows.
"""

import torch
import triton
import triton.language as tl

from paceline_kernels.activation.gates import Gate
from paceline_kernels.activation.triton import gate_times
from paceline_kernels.experts.triton.launches import FewSlotsLaunch
from paceline_kernels.linear.triton.weights import widened


def launch_few_slots(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    experts: torch.Tensor,
    gate: Gate | None,
    launch: FewSlotsLaunch,
    first_expert: int = 0,
) -> torch.Tensor:
    """As `launch_expert_tiles`: [num_slots, out]. experts: [num_tokens, top_k]; a slot without one of those from
    first_expert on has zeros.
    """
    num_slots, num_experts, num_outputs = experts.numel(), len(weight), weight.shape[1]
    if gate is not None:
        num_outputs //= 2
    out = torch.empty((num_slots, num_outputs), dtype=x.dtype, device=x.device)
    multiply_few_slots[(num_slots, triton.cdiv(num_outputs, launch.outputs))](
        out,
        x,
        weight,
        scales,
        experts,
        first_expert,
        num_experts,
        weight.shape[2],
        num_outputs,
        SHARING=num_slots // len(x),
        GATE=None if gate is None else gate.name,
        OUTPUTS=launch.outputs,
        WIDTH=launch.width,
        num_warps=launch.num_warps,
    )
    return out


@triton.jit(do_not_specialize=["first_expert"])
def multiply_few_slots(
    out,  # [num_slots, num_outputs]
    x,  # [num_slots / SHARING, num_inputs]
    weight,  # [num_experts, num_outputs or with a gate twice that, num_inputs]
    scales,  # [num_experts, the same] float32, or None
    experts,  # [num_slots] int32
    first_expert,
    num_experts,
    num_inputs,
    num_outputs,
    SHARING: tl.constexpr,  # slots of a row of x
    GATE: tl.constexpr,  # a Gate's name, or None
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """OUTPUTS columns of a slot; a program each."""
    slot = tl.program_id(0)
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = outputs < num_outputs
    expert = tl.load(experts + slot) - first_expert
    read = inside & (expert >= 0) & (expert < num_experts)
    matrix_outputs = num_outputs if GATE is None else 2 * num_outputs
    rows = expert.to(tl.int64) * matrix_outputs + outputs
    row_of_x = x + (slot // SHARING).to(tl.int64) * num_inputs
    sums = tl.zeros([OUTPUTS, WIDTH], tl.float32)
    ups = tl.zeros([OUTPUTS, WIDTH], tl.float32)
    for start in range(0, num_inputs, WIDTH):
        sums += products(weight, rows, row_of_x, read, start, num_inputs, WIDTH)
        if GATE is not None:
            ups += products(weight, rows + num_outputs, row_of_x, read, start, num_inputs, WIDTH)
    numbers = scaled(tl.sum(sums, 1), scales, rows, read)
    if GATE is not None:
        numbers = gate_times(numbers, scaled(tl.sum(ups, 1), scales, rows + num_outputs, read), GATE == "SILU")
    tl.store(out + slot.to(tl.int64) * num_outputs + outputs, numbers.to(out.dtype.element_ty), mask=inside)


@triton.jit
def products(weight, rows, row_of_x, read, start, num_inputs, WIDTH: tl.constexpr):
    """Of some rows of weights, each with a row of x, number by number, from an input on: [rows, WIDTH]."""
    inputs = start + tl.arange(0, WIDTH)
    inside = read[:, None] & (inputs < num_inputs)[None, :]
    # Every row's thread reads its own numbers of x, too, from the first level: sharing them would take barriers.
    numbers = tl.load(row_of_x + tl.broadcast_to(inputs[None, :], [rows.shape[0], WIDTH]), mask=inside, other=0.0)
    w = tl.load(weight + rows[:, None] * num_inputs + inputs[None, :], mask=inside, other=0.0)
    return widened(w, numbers.dtype).to(tl.float32) * numbers.to(tl.float32)


@triton.jit
def scaled(sums, scales, rows, read):
    if scales is not None:
        sums *= tl.load(scales + rows, mask=read, other=0.0)
    return sums

"""Products of few tokens by their experts' matrices on a GPU: no slot waits to be grouped, and no sum meets in memory.

A program has some outputs of a slot, or of a token and then of all its experts, which it adds up in the order of the
choice. It reads rows of weights straight into registers and multiplies there, as matrix instructions would be empty but
for a column. Programs of one output block follow each other, so that slots of one expert find its weights in the second
level. Knows programs; which sizes are best, the launch table knows.
"""

import torch
import triton
import triton.language as tl

from paceline_kernels.activation.gates import Gate
from paceline_kernels.activation.triton import gate_times
from paceline_kernels.experts.routes import Routes
from paceline_kernels.experts.triton.launches import FewSlotsLaunch
from paceline_kernels.linear.triton.weights import widened


def launch_gate_up(
    x: torch.Tensor,
    routes: Routes,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    gate: Gate,
    launch: FewSlotsLaunch,
) -> torch.Tensor:
    """[num_slots, intermediate]: of x [num_tokens, hidden], gated. weight: [num_experts, 2 * intermediate, hidden]."""
    num_slots, (num_experts, both, hidden) = routes.experts.numel(), weight.shape
    out = torch.empty((num_slots, both // 2), dtype=x.dtype, device=x.device)
    gate_up_few_slots[(num_slots, triton.cdiv(both // 2, launch.outputs))](
        out,
        x,
        weight,
        scales,
        routes.experts,
        num_experts,
        hidden,
        both // 2,
        SHARING=routes.experts.shape[1],
        IS_SILU=gate is Gate.SILU,
        OUTPUTS=launch.outputs,
        WIDTH=launch.width,
        num_warps=launch.num_warps,
    )
    return out


def launch_down(
    gated: torch.Tensor, routes: Routes, weight: torch.Tensor, scales: torch.Tensor | None, launch: FewSlotsLaunch
) -> torch.Tensor:
    """[num_tokens, hidden], the sum over experts, weighted. gated: [num_slots, intermediate]. weight: [num_experts,
    hidden, intermediate].
    """
    (num_tokens, top_k), (num_experts, hidden, intermediate) = routes.experts.shape, weight.shape
    out = torch.empty((num_tokens, hidden), dtype=gated.dtype, device=gated.device)
    down_few_tokens[(num_tokens, triton.cdiv(hidden, launch.outputs))](
        out,
        gated,
        weight,
        scales,
        routes.experts,
        routes.weights,
        num_experts,
        intermediate,
        hidden,
        TOP_K=top_k,
        OUTPUTS=launch.outputs,
        WIDTH=launch.width,
        num_warps=launch.num_warps,
    )
    return out


@triton.jit
def gate_up_few_slots(
    out,  # [num_slots, num_outputs]
    x,  # [num_slots / SHARING, num_inputs]
    weight,  # [num_experts, 2 * num_outputs, num_inputs]
    scales,  # [num_experts, 2 * num_outputs] float32, or None
    experts,  # [num_slots] int32
    num_experts,
    num_inputs,
    num_outputs,
    SHARING: tl.constexpr,
    IS_SILU: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    slot = tl.program_id(0)
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = outputs < num_outputs
    expert = tl.load(experts + slot)
    read = inside & (expert >= 0) & (expert < num_experts)
    gates = expert.to(tl.int64) * 2 * num_outputs + outputs
    row = x + (slot // SHARING).to(tl.int64) * num_inputs
    sums = tl.zeros([OUTPUTS, WIDTH], tl.float32)
    ups = tl.zeros([OUTPUTS, WIDTH], tl.float32)
    for start in range(0, num_inputs, WIDTH):
        sums += products(weight, gates, row, read, start, num_inputs, WIDTH)
        ups += products(weight, gates + num_outputs, row, read, start, num_inputs, WIDTH)
    gate, up = scaled(tl.sum(sums, 1), scales, gates, read), scaled(tl.sum(ups, 1), scales, gates + num_outputs, read)
    numbers = gate_times(gate, up, IS_SILU).to(out.dtype.element_ty)
    tl.store(out + slot.to(tl.int64) * num_outputs + outputs, numbers, mask=inside)


@triton.jit
def down_few_tokens(
    out,  # [num_tokens, num_outputs]
    x,  # [num_tokens * TOP_K, num_inputs]
    weight,  # [num_experts, num_outputs, num_inputs]
    scales,  # [num_experts, num_outputs] float32, or None
    experts,  # [num_tokens, TOP_K] int32
    route_weights,  # [num_tokens, TOP_K] float32
    num_experts,
    num_inputs,
    num_outputs,
    TOP_K: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = outputs < num_outputs
    total = tl.zeros([OUTPUTS], tl.float32)
    for choice in range(TOP_K):
        slot = token * TOP_K + choice
        expert, route_weight = route_of(experts, route_weights, slot, num_experts)
        read = inside & (expert >= 0) & (expert < num_experts)
        rows = expert.to(tl.int64) * num_outputs + outputs
        sums = tl.zeros([OUTPUTS, WIDTH], tl.float32)
        for start in range(0, num_inputs, WIDTH):
            sums += products(weight, rows, x + slot * num_inputs, read, start, num_inputs, WIDTH)
        total += route_weight * scaled(tl.sum(sums, 1), scales, rows, read)
    tl.store(out + token * num_outputs + outputs, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def products(weight, rows, row_of_x, read, start, num_inputs, WIDTH: tl.constexpr):
    """Of some rows of weights, each with a row of x, number by number, from an input on: [rows, WIDTH]."""
    inputs = start + tl.arange(0, WIDTH)
    input_inside = inputs < num_inputs
    numbers = tl.load(row_of_x + inputs, mask=input_inside, other=0.0)
    places = weight + rows[:, None] * num_inputs + inputs[None, :]
    w = tl.load(places, mask=read[:, None] & input_inside[None, :], other=0.0)
    return widened(w, numbers.dtype).to(tl.float32) * numbers.to(tl.float32)[None, :]


@triton.jit
def scaled(sums, scales, rows, read):
    if scales is not None:
        sums *= tl.load(scales + rows, mask=read, other=0.0)
    return sums


@triton.jit
def route_of(experts, route_weights, slot, num_experts):
    """(expert of a slot, its weight), which is NaN where there is no such expert."""
    expert = tl.load(experts + slot)
    is_one = (expert >= 0) & (expert < num_experts)
    return expert, tl.where(is_one, tl.load(route_weights + slot), float("nan"))

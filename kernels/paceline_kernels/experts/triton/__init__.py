"""experts for GPUs: which products for how many tokens. Knows sizes; no slot's expert is known to the host."""

import torch

from paceline_kernels.activation.gates import Gate
from paceline_kernels.experts.routes import WHOLE, ExpertParts, Routes
from paceline_kernels.experts.triton.combining import combine
from paceline_kernels.experts.triton.few_slots import launch_few_slots
from paceline_kernels.experts.triton.grouping import group
from paceline_kernels.experts.triton.groups import launch_expert_groups
from paceline_kernels.experts.triton.launches import (
    FEW_SLOTS,
    group_tiles_launch,
    takes_few_slots,
    tiles_launch,
)
from paceline_kernels.experts.triton.router import route
from paceline_kernels.experts.triton.tiles import launch_expert_tiles
from paceline_kernels.gpu import architecture
from paceline_kernels.gpu.splits import Splits
from paceline_kernels.grouped_linear.weights import GroupedWeight
from paceline_kernels.scaled_linear.weights import ScaledWeight

__all__ = ["gated_experts", "route"]


def gated_experts(
    x: torch.Tensor,
    routes: Routes,
    gate_up: torch.Tensor | ScaledWeight | GroupedWeight,
    down: torch.Tensor | ScaledWeight | GroupedWeight,
    gate: Gate,
    splits: Splits,
    parts: ExpertParts = WHOLE,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """parts: divided with fixed splits of floats alone. dtype: of the result, else x's."""
    if isinstance(gate_up, GroupedWeight) or isinstance(down, GroupedWeight):
        assert isinstance(gate_up, GroupedWeight)
        assert isinstance(down, GroupedWeight)
        return gated_groups(x, routes, gate_up, down, gate, splits, parts, dtype)
    (up_weight, up_scales), (down_weight, down_scales) = apart(gate_up), apart(down)
    architecture.check_fp8("gated_experts", up_weight, down_weight)
    (num_tokens, top_k), num_experts = routes.experts.shape, len(up_weight)
    if not num_tokens * x.shape[1]:
        return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    first, in_all = parts.first_expert, parts.num_experts or num_experts
    if splits is Splits.EVEN and takes_few_slots(num_tokens, top_k, in_all):
        gated = launch_few_slots(x, up_weight, up_scales, routes.experts, gate, FEW_SLOTS, first)
        products = launch_few_slots(gated, down_weight, down_scales, routes.experts, None, FEW_SLOTS, first)
        return combine(products, routes, num_experts, parts, dtype)
    num_slots, is_fixed = num_tokens * top_k, splits is Splits.FIXED
    widest = max(up_weight.dtype, down_weight.dtype, key=lambda dtype: dtype.itemsize)
    launch = tiles_launch(architecture.current(), widest, num_slots, in_all, is_fixed=is_fixed)
    tiles = group(routes.experts, num_experts, launch.gate_up.tokens, first)
    gated = launch_expert_tiles(x, up_weight, up_scales, tiles, num_slots, gate, launch.gate_up)
    products = launch_expert_tiles(gated, down_weight, down_scales, tiles, num_slots, None, launch.down, parts.slices)
    return combine(products, routes, num_experts, parts, dtype)


def gated_groups(
    x: torch.Tensor,
    routes: Routes,
    gate_up: GroupedWeight,
    down: GroupedWeight,
    gate: Gate,
    splits: Splits,
    parts: ExpertParts,
    dtype: torch.dtype | None,
) -> torch.Tensor:
    """Always by tiles: of an expert that is read once per slot numbers would be made once per slot, too."""
    num_slots, num_experts = routes.experts.numel(), down.layout.num_outputs // x.shape[1]
    if not num_slots:
        return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    is_plain, is_fixed = gate_up.is_plain and down.is_plain, splits is Splits.FIXED
    in_all = parts.num_experts or num_experts
    launch = group_tiles_launch(architecture.current(), num_slots, in_all, is_plain=is_plain, is_fixed=is_fixed)
    tiles = group(routes.experts, num_experts, launch.tokens, parts.first_expert)
    gated = launch_expert_groups(x, gate_up, tiles, num_slots, gate, down.layout.num_inputs, launch)
    products = launch_expert_groups(gated, down, tiles, num_slots, None, x.shape[1], launch)
    return combine(products, routes, num_experts, parts, dtype)


def apart(weight: torch.Tensor | ScaledWeight) -> tuple[torch.Tensor, torch.Tensor | None]:
    return (weight.values, weight.scales) if isinstance(weight, ScaledWeight) else (weight, None)

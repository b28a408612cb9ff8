"""What a token's experts made of it, added up on a GPU by the token itself: no result depends on who is done first.

Knows slots and weights; not what experts are.
"""

import torch
import triton
import triton.language as tl

from paceline_kernels.experts.routes import WHOLE, ExpertParts, Routes
from paceline_kernels.linear.triton.slices import with_neighbours, with_those_left

# As `activation`: one 16-byte load of 16-bit numbers per thread and slot.
_BLOCK, _NUM_WARPS = 1024, 4


def combine(
    products: torch.Tensor,
    routes: Routes,
    num_experts: int,
    parts: ExpertParts = WHOLE,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """products: [slices * num_tokens * top_k, width]. dtype: of the result, [num_tokens, width], else theirs."""
    num_tokens, top_k = routes.experts.shape
    width = products.shape[1]
    out = torch.empty((num_tokens, width), dtype=dtype or products.dtype, device=products.device)
    combine_slots[(num_tokens, triton.cdiv(width, _BLOCK))](
        out,
        products,
        routes.experts,
        routes.weights,
        parts.first_expert,
        num_experts,
        num_tokens * top_k,
        width,
        TOP_K=top_k,
        SLICES=parts.slices,
        GROUPS=parts.groups,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
    )
    return out


@triton.jit(do_not_specialize=["first_expert", "num_slots"])
def combine_slots(
    out,  # [num_tokens, width]
    products,  # [SLICES, num_tokens, TOP_K, width]
    experts,  # [num_tokens, TOP_K] int32
    route_weights,  # [num_tokens, TOP_K] float32
    first_expert,
    num_experts,
    num_slots,
    width,
    TOP_K: tl.constexpr,
    SLICES: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program per token and BLOCK columns. A choice of an expert that is not there adds nothing."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    none = tl.zeros([BLOCK], tl.float32)
    total, of_one, of_two, of_four = none, none, none, none  # the latter wait for a neighbour
    for number in range(SLICES * GROUPS):
        total = none
        for choice in range(TOP_K):
            slot = token * TOP_K + choice
            expert = tl.load(experts + slot) - first_expert
            is_one = (expert >= 0) & (expert < num_experts)
            if GROUPS > 1:
                is_one &= expert // (num_experts // GROUPS) == number % GROUPS
            route_weight = tl.where(is_one, tl.load(route_weights + slot), 0.0)
            place = products + (number // GROUPS * num_slots + slot) * width
            total += route_weight * tl.load(place + columns, mask=inside & is_one, other=0.0).to(tl.float32)
        if SLICES * GROUPS > 1:
            total, of_one, of_two, of_four = with_neighbours(number, total, of_one, of_two, of_four)
    total = with_those_left(total, of_two, of_four, SLICES * GROUPS)
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=inside)

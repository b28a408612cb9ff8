"""What a token's experts made of it, added up on a GPU by the token itself: no result depends on who is done first.

Knows slots and weights; not what experts are.
"""

import torch
import triton
import triton.language as tl

from paceline_kernels.experts.routes import Routes

# As `activation`: one 16-byte load of 16-bit numbers per thread and slot.
_BLOCK, _NUM_WARPS = 1024, 4


def combine(products: torch.Tensor, routes: Routes, num_experts: int) -> torch.Tensor:
    """products: [num_tokens * top_k, width]. Returns [num_tokens, width]."""
    num_tokens, top_k = routes.experts.shape
    width = products.shape[1]
    out = torch.empty((num_tokens, width), dtype=products.dtype, device=products.device)
    combine_slots[(num_tokens, triton.cdiv(width, _BLOCK))](
        out, products, routes.experts, routes.weights, num_experts, width, top_k, _BLOCK, num_warps=_NUM_WARPS
    )
    return out


@triton.jit
def combine_slots(
    out,  # [num_tokens, width]
    products,  # [num_tokens, TOP_K, width]
    experts,  # [num_tokens, TOP_K] int32
    route_weights,  # [num_tokens, TOP_K] float32
    num_experts,
    width,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program per token and BLOCK columns. The weight of a slot without an expert counts as NaN."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(TOP_K):
        slot = token * TOP_K + choice
        expert = tl.load(experts + slot)
        is_one = (expert >= 0) & (expert < num_experts)
        route_weight = tl.where(is_one, tl.load(route_weights + slot), float("nan"))
        total += route_weight * tl.load(products + slot * width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=inside)

"""Which experts rows of logits choose, on a GPU: a program and a warp per row, whose experts it has in registers.

Experts are chosen one after another, each by a maximum and the lowest number that has it. Knows numbers of one row.
"""

import torch
import triton
import triton.language as tl

from paceline_kernels.experts.routes import Routes
from paceline_kernels.routing import Routing


def route(logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None) -> Routes:
    shape = (logits.shape[0], routing.top_k)
    chosen = torch.empty(shape, dtype=torch.int32, device=logits.device)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    if chosen.numel():
        num_groups = routing.num_groups if routing.top_groups < routing.num_groups else 1
        size = routing.num_experts // num_groups
        route_rows[(shape[0],)](
            chosen,
            weights,
            logits,
            bias,
            routing.scaling,
            SCORE=routing.score.name,
            RENORMALISES=routing.renormalises,
            NUM_GROUPS=num_groups,
            TOP_GROUPS=min(routing.top_groups, num_groups),
            SIZE=size,
            TOP_K=routing.top_k,
            GROUPS=triton.next_power_of_2(num_groups),
            PLACES=triton.next_power_of_2(size),
            CHOICES=triton.next_power_of_2(routing.top_k),
            num_warps=1,
        )
    return Routes(chosen, weights)


@triton.jit
def route_rows(
    experts,  # [rows, TOP_K] int32
    weights,  # [rows, TOP_K] float32
    logits,  # [rows, NUM_GROUPS * SIZE]
    bias,  # [NUM_GROUPS * SIZE] float32, or None
    scaling,
    SCORE: tl.constexpr,
    RENORMALISES: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SIZE: tl.constexpr,  # of a group
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,  # at least NUM_GROUPS
    PLACES: tl.constexpr,  # at least SIZE
    CHOICES: tl.constexpr,  # at least TOP_K
):
    row = tl.program_id(0).to(tl.int64)
    groups, within, choices = tl.arange(0, GROUPS), tl.arange(0, PLACES), tl.arange(0, CHOICES)
    numbers = groups[:, None] * SIZE + within[None, :]
    inside = (groups < NUM_GROUPS)[:, None] & (within < SIZE)[None, :]
    least = float("-inf")
    scores = tl.load(logits + row * (NUM_GROUPS * SIZE) + numbers, mask=inside, other=least).to(tl.float32)
    if SCORE == "SIGMOID":
        scores = 1.0 / (1.0 + tl.exp(-scores))
    elif SCORE == "SOFTMAX":
        scores = tl.exp(scores - tl.max(scores))
        scores /= tl.sum(scores)
    ranking = scores
    if bias is not None:
        ranking += tl.load(bias + numbers, mask=inside, other=0.0)
    is_spoilt = tl.max((ranking != ranking).to(tl.int32)) > 0
    ranking = tl.where(is_spoilt, 0.0, ranking)
    free = inside
    if TOP_GROUPS < NUM_GROUPS:
        free &= groups_chosen(ranking, inside, within, groups, TOP_GROUPS)[:, None]
    chosen, picked = tl.zeros([CHOICES], tl.int32), tl.full([CHOICES], least, tl.float32)
    for choice in range(TOP_K):
        value = tl.max(tl.where(free, ranking, least))
        expert = tl.min(tl.where(free & (ranking == value), numbers, NUM_GROUPS * SIZE))
        score = value if bias is None else tl.sum(tl.where(numbers == expert, scores, 0.0))
        free &= numbers != expert
        chosen = tl.where(choices == choice, expert, chosen)
        picked = tl.where(choices == choice, score, picked)
    if SCORE == "SOFTMAX_OF_CHOSEN":
        picked = tl.exp(picked - tl.max(picked))
        picked /= tl.sum(picked)
    if RENORMALISES:
        total = tl.sum(tl.where(choices < TOP_K, picked, 0.0))
        picked /= total + 1e-20 if SCORE == "SIGMOID" else total
    picked = tl.where(is_spoilt, float("nan"), picked * scaling)
    places = row * TOP_K + choices
    tl.store(experts + places, chosen, mask=choices < TOP_K)
    tl.store(weights + places, picked, mask=choices < TOP_K)


@triton.jit
def groups_chosen(ranking, inside, within, groups, TOP_GROUPS: tl.constexpr):
    """Whether each group is among the TOP_GROUPS with the largest sums of their two best. All but ranking as there."""
    least, PLACES = float("-inf"), within.shape[0]
    ranking = tl.where(inside, ranking, least)
    best = tl.max(ranking, 1)
    place = tl.min(tl.where(ranking == best[:, None], within[None, :], PLACES), 1)
    second = tl.max(tl.where(within[None, :] == place[:, None], least, ranking), 1)
    values = tl.where(second == least, best, best + second)  # a group may be of one
    left = groups >= 0
    for _ in range(TOP_GROUPS):
        value = tl.max(tl.where(left, values, least))
        left &= groups != tl.min(tl.where(left & (values == value), groups, groups.shape[0]))
    return ~left

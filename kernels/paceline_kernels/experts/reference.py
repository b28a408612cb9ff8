"""experts in plain torch, in float64: token by token, expert by expert."""

import torch

from paceline_kernels.activation import Gate
from paceline_kernels.activation.reference import gate as gated
from paceline_kernels.experts.routes import Routes
from paceline_kernels.routing import Routing, Score


def route(logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None) -> Routes:
    rows = [_route_one(one, routing, bias) for one in logits.double()]
    chosen = torch.tensor([experts for experts, _ in rows], dtype=torch.int32).view(-1, routing.top_k)
    weights = torch.tensor([weights for _, weights in rows], dtype=torch.float32).view(-1, routing.top_k)
    return Routes(chosen, weights)


def _route_one(logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None) -> tuple[list[int], list[float]]:
    if logits.isnan().any():
        return list(range(routing.top_k)), [float("nan")] * routing.top_k
    by_sigmoid, of_chosen = routing.score is Score.SIGMOID, routing.score is Score.SOFTMAX_OF_CHOSEN
    scores = logits.sigmoid() if by_sigmoid else logits if of_chosen else logits.softmax(0)
    ranking = (scores if bias is None else scores + bias).tolist()
    size = routing.num_experts // routing.num_groups
    groups = [range(start, start + size) for start in range(0, routing.num_experts, size)]
    groups.sort(key=lambda group: -sum(sorted(ranking[expert] for expert in group)[-2:]))
    experts = sorted(expert for group in groups[: routing.top_groups] for expert in group)
    chosen = sorted(experts, key=lambda expert: -ranking[expert])[: routing.top_k]
    weights = scores[chosen].softmax(0) if of_chosen else scores[chosen]
    if routing.renormalises:
        weights = weights / (weights.sum() + (1e-20 if by_sigmoid else 0.0))
    return chosen, (weights * routing.scaling).tolist()


def gated_experts(
    x: torch.Tensor, routes: Routes, gate_up: torch.Tensor, down: torch.Tensor, gate: Gate, first_expert: int = 0
) -> torch.Tensor:
    """Rounded to float32 once, at the end."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, (experts, weights) in enumerate(zip(routes.experts.tolist(), routes.weights.tolist(), strict=True)):
        for chosen, weight in zip(experts, weights, strict=True):
            expert = chosen - first_expert
            if expert not in range(len(gate_up)):
                continue
            gates, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            out[token] += weight * (down[expert].double() @ (gated(gates, gate) * up))
    return out.float()

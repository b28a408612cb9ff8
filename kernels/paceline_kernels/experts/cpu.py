"""experts for CPUs: the tokens of an expert together, so that its weights are streamed once.

Batch-invariant by construction: products do not depend on the tokens beside one, and every token adds its experts'
results itself, in the order of its choice.
"""

import numpy as np
import numpy.typing as npt
import torch

from paceline_kernels.activation import Gate
from paceline_kernels.activation import cpu as activation
from paceline_kernels.experts.routes import ExpertParts, Routes
from paceline_kernels.linear import cpu as linear
from paceline_kernels.routing import Routing, Score

_Rows = npt.NDArray[np.float32]


@np.errstate(over="ignore", invalid="ignore")  # infinity and NaN are results like others
def route(logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None) -> Routes:
    numbers = logits.numpy()
    is_nan = np.isnan(numbers).any(axis=1, keepdims=True)
    scores = _scores(np.where(is_nan, np.float32(0), numbers), routing.score)
    ranking = scores if bias is None else scores + bias.numpy()
    if routing.top_groups < routing.num_groups:
        ranking = _of_best_groups(ranking, routing)
    chosen = np.argsort(-ranking, axis=1, kind="stable")[:, : routing.top_k]
    weights = np.take_along_axis(scores, chosen, axis=1)
    if routing.score is Score.SOFTMAX_OF_CHOSEN:
        weights = _softmax(weights)
    if routing.renormalises:
        least = np.float32(1e-20 if routing.score is Score.SIGMOID else 0.0)
        weights = weights / (weights.sum(axis=1, keepdims=True) + least)
    weights = np.where(is_nan, np.float32("nan"), weights * np.float32(routing.scaling))
    return Routes(torch.from_numpy(chosen.astype(np.int32)), torch.from_numpy(weights))


def _scores(logits: _Rows, score: Score) -> _Rows:
    if score is Score.SIGMOID:
        sigmoids: _Rows = np.float32(1) / (np.float32(1) + np.exp(-logits))
        return sigmoids
    return _softmax(logits) if score is Score.SOFTMAX else logits


def _softmax(logits: _Rows) -> _Rows:
    powers: _Rows = np.exp(logits - logits.max(axis=1, keepdims=True))
    powers /= powers.sum(axis=1, keepdims=True)
    return powers


def _of_best_groups(ranking: _Rows, routing: Routing) -> _Rows:
    """Experts of all other groups rank below all numbers."""
    groups = ranking.reshape(len(ranking), routing.num_groups, -1)
    values = np.sort(groups, axis=2)[:, :, -2:].sum(axis=2)
    best = np.argsort(-values, axis=1, kind="stable")[:, : routing.top_groups]
    is_best = np.zeros(values.shape, dtype=bool)
    np.put_along_axis(is_best, best, values=True, axis=1)
    return np.where(is_best[:, :, None], groups, np.float32("-inf")).reshape(ranking.shape)


def gated_experts(
    x: torch.Tensor, routes: Routes, gate_up: torch.Tensor, down: torch.Tensor, gate: Gate, parts: ExpertParts
) -> torch.Tensor:
    (num_tokens, top_k), (num_experts, hidden, _) = routes.experts.shape, down.shape
    chosen = routes.experts.numpy() - parts.first_expert
    by_expert = np.argsort(chosen, axis=None, kind="stable")
    firsts = np.searchsorted(chosen.reshape(-1)[by_expert], np.arange(num_experts + 1))
    results = np.empty((parts.slices, num_tokens * top_k, hidden), dtype=np.float32)
    for expert in np.flatnonzero(np.diff(firsts)):
        slots = by_expert[firsts[expert] : firsts[expert + 1]]
        tokens = torch.from_numpy(x.numpy()[slots // top_k])
        gated = activation.gate_and_multiply(linear.linear(tokens, gate_up[expert], None, 1), int(gate))
        results[:, slots] = linear.slice_products(gated, down[expert], parts.slices).numpy()
    by_choice = results.reshape(parts.slices, num_tokens, top_k, hidden)
    sums = np.zeros((parts.slices, parts.groups, num_tokens, hidden), dtype=np.float32)
    for choice in range(top_k):
        held = np.flatnonzero((chosen[:, choice] >= 0) & (chosen[:, choice] < num_experts))
        groups = chosen[held, choice] // (num_experts // parts.groups)
        sums[:, groups, held] += by_choice[:, held, choice] * routes.weights.numpy()[held, choice, None]
    return linear.sum_of_slices(torch.from_numpy(sums.reshape(parts.slices * parts.groups, num_tokens, hidden)))

"""The two acceptances of a draft, from the distributions of target and drafter at one place.

Knows definitions. It refuses to know models and texts.
"""

from dataclasses import dataclass

import torch

from paceline_kernels.sampling import SamplingParameters, sample


@dataclass(frozen=True, slots=True)
class Drawing:
    """How tokens are drawn."""

    temperature: float
    top_p: float


def probabilities(logprobs: torch.Tensor, drawing: Drawing) -> torch.Tensor:
    """What a draw has each token with: [num_places, vocab] float64, from natural logarithms of that shape."""
    scaled = torch.softmax(logprobs.double() / drawing.temperature, dim=-1)
    if drawing.top_p == 1.0:
        return scaled
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    ordered[ordered.cumsum(dim=-1) - ordered >= drawing.top_p] = 0.0
    kept = torch.zeros_like(scaled).scatter_(1, order, ordered)
    return kept / kept.sum(dim=-1, keepdim=True)


def rejection_acceptance(target: torch.Tensor, drafter: torch.Tensor) -> torch.Tensor:
    """How likely a draft is accepted by a ratio of probabilities, the most that any scheme reaches: the sum of what
    both have in common (Leviathan et al., 2023, https://arxiv.org/abs/2211.17192, 3.2). [num_places]
    """
    return torch.minimum(target, drafter).sum(dim=-1)


def coupled_acceptance(target: torch.Tensor, drafter: torch.Tensor) -> torch.Tensor:
    """How likely both draw the same token by the Gumbel maximum with the same noise. [num_places]

    Both draw i with 1 / sum over j of max(p_j / p_i, q_j / q_i): of the exponential times that race, those of j end
    before i's in one of the two races at the larger of both rates. Sorted by p / q the maxima are two runs of sums.
    """
    ratio = torch.where(drafter > 0, target / drafter, torch.inf)
    order = ratio.float().argsort(dim=-1, descending=True)
    p, q = target.gather(1, order), drafter.gather(1, order)
    by_target, by_drafter = p.cumsum(dim=-1), q.sum(dim=-1, keepdim=True) - q.cumsum(dim=-1)
    in_both = (p > 0) & (q > 0)
    waits = torch.where(in_both, by_target / p + by_drafter / q, torch.inf)
    return (1 / waits).sum(dim=-1)


def drawn_alike(target: torch.Tensor, drafter: torch.Tensor, drawing: Drawing, seed: int) -> torch.Tensor:
    """Whether the executor's own draws from these logarithms are the same, place by place. [num_places] bool"""
    places = target.shape[0]
    parameters = SamplingParameters(
        temperature=torch.full((places,), drawing.temperature),
        top_k=torch.zeros(places, dtype=torch.int32),
        top_p=torch.full((places,), drawing.top_p),
        min_p=torch.zeros(places),
        seeds=torch.full((places,), seed, dtype=torch.int64),
        offsets=torch.arange(places, dtype=torch.int32),
        num_logprobs=torch.full((places,), -1, dtype=torch.int32),
    )
    tokens = [sample(logprobs.contiguous(), parameters).token_ids for logprobs in (target, drafter)]
    return tokens[0] == tokens[1]

"""How well each kind of numbers predicts a text, and how far it is from float32.

Knows the definitions of the figures. It refuses to know files, tokenizers, tables and what the kinds are called.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from paceline_executor.numerics import FLOAT32_NUMERICS, Numerics
from paceline_executor.weights import Checkpoint
from quality.predictor import predictors

# The first tokens of a window are given, not predicted: with so little before them they would measure chance.
NUM_GIVEN = 16


@dataclass(frozen=True, slots=True)
class Quality:
    """One kind of numbers on one text. For float32 itself all differences are none."""

    num_predicted: int
    perplexity: float
    difference: float  # of the perplexity from that of float32, relative to it: 0.01 is 1 % worse
    standard_error: float  # of `difference`, as far as the choice of the text goes
    kl_divergence: float  # from float32's distribution to this one, in nats, the mean of all places
    same_best: float  # the share of places whose likeliest token is the same


@dataclass(frozen=True, slots=True)
class _Scores:
    """What one window says about one kind of numbers, place by place."""

    surprise: torch.Tensor  # [num_predicted] float64, minus the log-probability of the token that stands there
    kl_divergence: torch.Tensor  # [num_predicted] float64
    same_best: torch.Tensor  # [num_predicted] bool


def measure(
    checkpoint: Checkpoint, candidates: Sequence[Numerics], windows: Iterable[Sequence[int]], max_window: int
) -> list[Quality]:
    """The figures of float32 and then of each candidate, over all windows; each window is read afresh.

    Nothing is predicted in windows of `NUM_GIVEN` tokens or fewer; at least one has to be longer. The calling thread's
    number of threads is that of `jit.set_num_threads`. The distributions of one window are held at a time: a few times
    window * vocabulary * 4 bytes.
    """
    float32, *others = predictors(checkpoint, [FLOAT32_NUMERICS, *candidates], max_window)
    all_scores: list[list[_Scores]] = [[] for _ in (float32, *others)]
    for window in windows:
        if len(window) <= NUM_GIVEN:
            continue
        targets = torch.tensor(window[NUM_GIVEN:])
        reference = float32.logprobs(window, NUM_GIVEN)
        all_scores[0].append(_compare(reference, reference, targets))
        for scores, predictor in zip(all_scores[1:], others, strict=True):
            scores.append(_compare(predictor.logprobs(window, NUM_GIVEN), reference, targets))
    joined = [_join(scores) for scores in all_scores]
    return [_quality(scores, joined[0]) for scores in joined]


def _compare(logprobs: torch.Tensor, reference: torch.Tensor, targets: torch.Tensor) -> _Scores:
    divergence = functional.kl_div(logprobs, reference, reduction="none", log_target=True)
    return _Scores(
        surprise=-logprobs.gather(1, targets[:, None])[:, 0].double(),
        kl_divergence=divergence.sum(dim=-1, dtype=torch.float64),
        same_best=logprobs.argmax(dim=-1) == reference.argmax(dim=-1),
    )


def _join(scores: Sequence[_Scores]) -> _Scores:
    return _Scores(
        surprise=torch.cat([each.surprise for each in scores]),
        kl_divergence=torch.cat([each.kl_divergence for each in scores]),
        same_best=torch.cat([each.same_best for each in scores]),
    )


def _quality(scores: _Scores, float32: _Scores) -> Quality:
    num_predicted = len(scores.surprise)
    excess = scores.surprise - float32.surprise
    ratio = math.exp(excess.mean())
    return Quality(
        num_predicted=num_predicted,
        perplexity=math.exp(scores.surprise.mean()),
        difference=ratio - 1,
        standard_error=ratio * float(excess.std(correction=0)) / math.sqrt(num_predicted),
        kl_divergence=float(scores.kl_divergence.mean()),
        same_best=float(scores.same_best.double().mean()),
    )

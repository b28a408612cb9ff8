"""What is said of two models, against whole distributions, and against many samples of windows."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from executor_rig.cpu import cpu_runner
from paceline_executor.numerics import KvDtype, MatrixKind, Numerics
from paceline_executor.validation.scores import (
    Comparison,
    answers,
    compare,
    figures,
    first_difference,
    predict,
)
from paceline_executor.validation.texts import NUM_GIVEN
from random_models import tiny_checkpoint

PACKED = Numerics(MatrixKind.PACKED, KvDtype.INT8)
SIZES = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 32, "intermediate_size": 96}
TEXT = np.random.default_rng(0).integers(0, 512, 300).tolist()
WINDOWS = [tuple(TEXT[:150]), tuple(TEXT[150:190]), tuple(TEXT[190:])]  # of three pieces, of one, of two


def runner_of(**options):
    numerics = {"numerics": options.pop("numerics")} if "numerics" in options else {}
    return cpu_runner(tiny_checkpoint(**SIZES, **options), num_blocks=64, block_size=16, **numerics)


def silent(_):
    """Nobody wants to know how far it is."""


def logprobs_of(runner, window):
    """Of all places at once, in float64."""
    pieces = runner.over_logits(np.array(window, dtype=np.int32), lambda _, logits: logits.clone())
    return torch.cat(pieces).double().log_softmax(-1)[NUM_GIVEN - 1 : -1]


def with_the_rest_as_one(probabilities):
    return torch.cat([probabilities[:, :256], probabilities[:, 256:].sum(-1, keepdim=True)], dim=-1)


@pytest.fixture(scope="module")
def sides():
    """A model, the same rounded, and one that has nothing to do with it."""
    return runner_of(), runner_of(numerics=PACKED), runner_of(seed=1)


@pytest.mark.parametrize("index", [1, 2], ids=["rounded", "another"])
def test_figures_equal_those_of_whole_distributions(sides, index):
    base, candidate = sides[0], sides[index]
    predictions = predict(base, WINDOWS, silent)
    comparison = compare(candidate, WINDOWS, predictions, silent)
    found = figures(predictions.target, comparison, [len(window) - NUM_GIVEN for window in WINDOWS])
    targets = torch.tensor([token for window in WINDOWS for token in window[NUM_GIVEN:]])
    p, q = (torch.cat([logprobs_of(side, window) for window in WINDOWS]) for side in (base, candidate))
    perplexities = [functional.nll_loss(each, targets).exp().item() for each in (p, q)]
    whole = functional.kl_div(q, p, reduction="none", log_target=True).sum(-1).mean().item()
    order = p.argsort(-1, descending=True)
    p_best, q_best = (with_the_rest_as_one(each.gather(1, order).exp()) for each in (p, q))
    kl = (p_best * (p_best / q_best).log()).sum(-1)
    assert [found.base_perplexity, found.perplexity] == pytest.approx(perplexities, rel=1e-5)
    assert found.increase == pytest.approx(perplexities[1] / perplexities[0] - 1, rel=1e-3)
    assert found.mean_divergence == pytest.approx(kl.mean().item(), rel=1e-3)
    assert found.p99_divergence == pytest.approx(kl.quantile(0.99).item(), rel=1e-3)
    assert whole / 2 < found.mean_divergence < whole  # of a model that knows nothing; others have shorter rests
    assert found.same_best == (p.argmax(-1) == q.argmax(-1)).double().mean().item()
    assert (found.num_windows, found.num_predicted) == (3, 300 - 3 * NUM_GIVEN)


def test_a_model_differs_in_nothing_from_itself(sides):
    predictions = predict(sides[0], WINDOWS, silent)
    comparison = compare(sides[0], WINDOWS, predictions, silent)
    found = figures(predictions.target, comparison, [len(window) - NUM_GIVEN for window in WINDOWS])
    assert (found.increase, found.lower, found.upper, found.same_best) == (0, 0, 0, 1)
    assert found.p99_divergence == pytest.approx(0, abs=1e-6)


def test_a_vocabulary_that_is_told_apart_whole_has_no_rest():
    small = runner_of(vocab_size=200)
    windows = [tuple(token % 200 for token in TEXT[:40])]
    predictions = predict(small, windows, silent)
    comparison = compare(runner_of(vocab_size=200, seed=1), windows, predictions, silent)
    p, q = (logprobs_of(side, windows[0]) for side in (small, runner_of(vocab_size=200, seed=1)))
    expected = functional.kl_div(q, p, reduction="none", log_target=True).sum(-1).numpy()
    assert comparison.divergence == pytest.approx(expected, rel=1e-4)


def test_answers_are_the_best_tokens_one_after_another(sides):
    runner, prompts = sides[0], [tuple(TEXT[:30]), tuple(TEXT[30:47])]
    found = answers(runner, prompts, 60, ())
    for answer, prompt in zip(found, prompts, strict=True):
        whole = np.array([*prompt, *answer], dtype=np.int32)
        best = torch.cat(runner.over_logits(whole, lambda _, logits: logits.argmax(-1)))
        assert list(answer) == best[len(prompt) - 1 : -1].tolist()
        assert len(answer) == 30
    ended = answers(runner, prompts, 60, [found[0][3]])
    assert ended[0] == found[0][: found[0].index(found[0][3]) + 1]


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [((1, 2), (1, 2), None), ((1, 2), (1, 3), 1), ((1, 2), (1,), 1), ((), (1,), 0), ((), (), None)],
)
def test_the_first_difference_of_answers(one, other, expected):
    assert first_difference(one, other) == expected


def drawn(generator, num_windows, mean, lengths):
    """Places of a window share much of their excess, and windows are of odd lengths."""
    sizes = generator.integers(*lengths, num_windows)
    shared = np.repeat(generator.normal(mean, 0.02, num_windows), sizes)
    return shared + generator.normal(0, 0.1, sizes.sum()), sizes


def figures_of(excess, sizes):
    zeros = np.zeros(excess.size, dtype=np.float32)
    return figures(zeros, Comparison(-excess.astype(np.float32), zeros, zeros == 0), sizes.tolist())


@pytest.mark.parametrize("num_windows", [16, 60])
def test_the_interval_holds_the_truth_in_95_of_100_samples(num_windows):
    generator = np.random.default_rng(1)
    samples = [figures_of(*drawn(generator, num_windows, 0.01, (20, 400))) for _ in range(1000)]
    held = np.mean([each.lower <= math.expm1(0.01) <= each.upper for each in samples])
    assert 0.93 < held < 0.97


def test_the_interval_is_as_wide_as_that_of_a_bootstrap_over_windows():
    generator = np.random.default_rng(2)
    excess, sizes = drawn(generator, 100, 0.01, (20, 400))
    found = figures_of(excess, sizes)
    sums = np.array([part.sum() for part in np.split(excess, np.cumsum(sizes)[:-1])])
    picked = generator.integers(0, 100, (4000, 100))
    ratios = np.expm1(sums[picked].sum(1) / sizes[picked].sum(1))
    lower, upper = np.quantile(ratios, [0.025, 0.975])
    assert found.upper - found.lower == pytest.approx(upper - lower, rel=0.1)
    assert found.lower == pytest.approx(lower, abs=0.1 * (upper - lower))


def test_one_window_has_no_interval():
    found = figures_of(np.full(100, 0.01), np.array([100]))
    assert (found.lower, found.upper) == (None, None)
    assert found.increase == pytest.approx(math.expm1(0.01))


def test_a_model_that_predicts_nothing_has_figures():
    found = figures_of(np.full(200, 5000.0), np.array([100, 100]))
    assert math.isfinite(found.perplexity + found.increase + found.upper)

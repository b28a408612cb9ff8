"""What `tests/bench/coupling` says of two distributions is what trying out says."""

import pytest
import torch

from coupling.measure import Drawing, coupled_acceptance, drawn_alike, probabilities, rejection_acceptance

PLAIN = Drawing(1.0, 1.0)


def pair(seed, num_places=3, vocab_size=12):
    """Logarithms of two distributions that are somewhat alike."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_places, vocab_size, generator=generator) * 2
    other = logits + torch.randn(num_places, vocab_size, generator=generator)
    return torch.log_softmax(logits, -1), torch.log_softmax(other, -1)


@pytest.mark.parametrize("drawing", [PLAIN, Drawing(0.7, 1.0), Drawing(1.0, 0.8)])
def test_the_coupled_acceptance_is_the_sum_over_all_pairs(drawing):
    target, drafter = (probabilities(each, drawing) for each in pair(1))
    for place, (p, q) in enumerate(zip(target.tolist(), drafter.tolist(), strict=True)):
        both = [i for i in range(len(p)) if p[i] and q[i]]
        expected = sum(1 / sum(max(p[j] / p[i], q[j] / q[i]) for j in range(len(p))) for i in both)
        assert float(coupled_acceptance(target, drafter)[place]) == pytest.approx(expected)


def test_draws_with_the_same_noise_are_equal_as_often_as_that():
    """Of 1,500 draws at each of three places; and never more often than rejection sampling accepts."""
    target, drafter = pair(2)
    many = [each.repeat(1500, 1) for each in (target, drafter)]
    shares = drawn_alike(*many, PLAIN, seed=1).double().view(1500, 3).mean(dim=0)
    expected = coupled_acceptance(*(probabilities(each, PLAIN) for each in (target, drafter)))
    assert (shares - expected).abs().max() < 0.065  # five standard errors
    assert (expected <= rejection_acceptance(target.double().exp(), drafter.double().exp())).all()


def test_what_top_p_leaves_out_is_never_drawn():
    kept = probabilities(torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log(), Drawing(1.0, 0.7))
    assert kept.tolist() == [[pytest.approx(0.625), pytest.approx(0.375), 0.0, 0.0]]

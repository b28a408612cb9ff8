"""rms_norm: right against float64, invariant, and the residual is replaced by the sum."""

import pytest
import torch

from paceline_kernels.errors import KernelArgumentError
from paceline_kernels.rms_norm import reference, rms_norm, rms_norm_heads
from paceline_kernels.testing.tensors import normal


@pytest.mark.parametrize(("num_tokens", "hidden"), [(1, 1), (3, 7), (31, 63), (32, 100), (33, 576)])
def test_rms_norm_equals_the_reference(num_tokens, hidden):
    x, weight = normal(num_tokens, hidden), normal(hidden, seed=1)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_tokens", [1, 5, 40])
def test_with_a_residual_the_sum_is_normalised_and_kept(num_tokens):
    x, residual, weight = normal(num_tokens, 50), normal(num_tokens, 50, seed=1), normal(50, seed=2)
    before, expected_sum = x.clone(), residual + x
    out = rms_norm(x, weight, 1e-5, residual=residual)
    assert torch.equal(residual, expected_sum)
    assert torch.equal(x, before)
    assert torch.equal(out, rms_norm(expected_sum, weight, 1e-5))


def test_a_row_has_the_same_bits_in_any_batch():
    x, weight = normal(70, 577), normal(577, seed=1)
    together = rms_norm(x, weight, 1e-5)
    assert torch.equal(torch.cat([rms_norm(row[None].clone(), weight, 1e-5) for row in x]), together)
    assert torch.equal(rms_norm(x[3:20].clone(), weight, 1e-5), together[3:20])


def test_a_row_of_zeros_stays_zero():
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-5), torch.zeros(2, 8))


def test_a_residual_of_another_shape_is_refused():
    with pytest.raises(KernelArgumentError, match="residual must have shape"):
        rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-5, residual=torch.zeros(3, 8))


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_heads_are_normalised_each_by_itself(num_tokens):
    qkv, query, key = normal(num_tokens, 7, 20), normal(20, seed=1), normal(20, seed=2)
    expected = reference.rms_norm_heads(qkv, query, key, 2, 1e-5)
    alone = qkv[:1].clone()
    rms_norm_heads(alone, query, key, 2, 1e-5)
    rms_norm_heads(qkv, query, key, 2, 1e-5)
    torch.testing.assert_close(qkv, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(qkv[:, 5:], expected[:, 5:])
    assert torch.equal(alone, qkv[:1])


def test_heads_that_do_not_fit_their_norms_are_refused():
    with pytest.raises(KernelArgumentError, match="does not fit 2 KV heads"):
        rms_norm_heads(torch.zeros(1, 4, 8), torch.ones(8), torch.ones(8), 2, 1e-5)

"""sample: the defined draw, token for token; the softmax it must follow; ties, log-probabilities and bad logits.

What rules do to logits is in test_sampling_rules.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline_kernels.compiler.jit import compiled_for_python
from paceline_kernels.errors import KernelArgumentError
from paceline_kernels.sampling import SampleOutcome, SamplingParameters, noise, reference, sample, token_logprobs
from paceline_kernels.testing.tensors import random_logits
from paceline_kernels.vector.philox import NUM_COUNTERS, NUM_WORDS, philox4x32
from paceline_kernels.vector.simd import address

# From kat_vectors of the Random123 library: counter, key, output.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def parameters(num_rows, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, offsets=None, num_logprobs=-1):
    """The same parameters for every row; offsets count up unless given."""

    def column(value, dtype):
        return torch.full((num_rows,), value, dtype=dtype)

    return SamplingParameters(
        temperature=column(temperature, torch.float32),
        top_k=column(top_k, torch.int32),
        top_p=column(top_p, torch.float32),
        min_p=column(min_p, torch.float32),
        seeds=column(seed, torch.int64),
        offsets=torch.arange(num_rows, dtype=torch.int32) if offsets is None else offsets,
        num_logprobs=column(num_logprobs, torch.int32),
    )


@compiled_for_python
def _philox(words, c0, c1, k0, k1):
    philox4x32(address(words), np.uint32(c0), np.uint32(c1), np.uint32(k0), np.uint32(k1))


@compiled_for_python
def _noise_and_bound(words, gumbels, bounds):
    for i in range(len(words)):
        gumbels[i], bounds[i] = noise.gumbel(words[i]), noise.gumbel_bound(words[i])


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(counter, key, expected):
    assert tuple(reference.philox4x32(np.array([counter], dtype=np.uint64), key)[0]) == expected


@pytest.mark.parametrize(("c0", "c1"), [(0, 0), (5, 0xFFFFFFFF), (0xFFFFFFFF, 7), (0x243F6A88, 0x85A308D3)])
@pytest.mark.parametrize("key", [(0, 0), (0xFFFFFFFF, 0xFFFFFFFF), (0xA4093822, 0x299F31D0)])
def test_compiled_philox_works_on_ascending_counters_at_once(c0, c1, key):
    """Word by word what numpy gives; a counter beyond 32 bits begins at zero again."""
    words = np.empty(NUM_WORDS, dtype=np.uint32)
    _philox(words, c0, c1, *key)
    counters = np.array([((c0 + i) % 2**32, c1, 0, 0) for i in range(NUM_COUNTERS)], dtype=np.uint64)
    assert words.tolist() == reference.philox4x32(counters, key).reshape(-1).tolist()


def test_no_noise_exceeds_its_bound():
    """At both ends of the range and at every 97th word between; the bound is useful where noise is loud."""
    ranks = np.concatenate((np.arange(5000), np.arange(5000, 2**23, 97), np.arange(2**23 - 5000, 2**23)))
    words = (ranks << 9).astype(np.uint32)
    gumbels, bounds = np.empty(len(words), dtype=np.float32), np.empty(len(words), dtype=np.float32)
    _noise_and_bound(words, gumbels, bounds)
    assert (gumbels <= bounds).all()
    assert (bounds - gumbels)[gumbels > 4].max() < 0.08


def test_the_noise_of_a_token_is_a_word_of_its_own():
    """Token 6 at offset 2 takes word 2 of counter (1, 2, 0, 0), seed halves low first: written out once more."""
    words = reference.philox4x32(np.array([[1, 2, 0, 0]], dtype=np.uint64), (0xDDDDDDDD, 0xAAAAAAAA))
    u = (float(words[0, 2] >> 9) + 0.5) / 2**23
    noise = reference.gumbel_noise(8, seed=0xAAAAAAAADDDDDDDD, offset=2)
    assert noise[6] == pytest.approx(-np.log(-np.log(u)), rel=1e-5)


@given(
    temperature=st.sampled_from([0.0, 1e-6, 0.2, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 40, 97, 1000]),
    top_p=st.sampled_from([1e-4, 0.3, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    seed=st.integers(-(2**63), 2**63 - 1),
    vocab_size=st.sampled_from([1, 3, 8, 97, 98, 99]),
)
def test_sample_equals_the_reference(temperature, top_k, top_p, min_p, seed, vocab_size):
    logits = random_logits(5, vocab_size, seed % 1000)
    chosen = parameters(5, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    assert torch.equal(sample(logits, chosen).token_ids, reference.sample(logits, chosen).token_ids)


def test_sample_equals_the_reference_over_a_large_vocabulary():
    """Where noise is drawn for a part of the tokens only."""
    logits = torch.randn(8, 49_152, generator=torch.Generator().manual_seed(0)) * 2
    filters = ({}, {"top_p": 0.95}, {"top_k": 50}, {"temperature": 30.0}, {"temperature": 0.3})
    for seed, filtering in enumerate(filters):
        chosen = parameters(8, seed=seed, **filtering)
        assert torch.equal(sample(logits, chosen).token_ids, reference.sample(logits, chosen).token_ids)


def chi_square(counts, probabilities):
    """Pearson's statistic, and a bound that a right sampler exceeds once in about 30,000 times (Wilson-Hilferty)."""
    kept = probabilities > 0
    expected = counts.sum() * probabilities[kept]
    degrees = int(kept.sum()) - 1
    statistic = float(((counts[kept] - expected) ** 2 / expected).sum())
    return statistic, degrees * (1 - 2 / (9 * degrees) + 4 * (2 / (9 * degrees)) ** 0.5) ** 3


@pytest.mark.parametrize(
    "filters",
    [{}, {"temperature": 0.7}, {"temperature": 2.5}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.05}],
    ids=str,
)
@pytest.mark.parametrize("by", ["offset", "seed"])
def test_samples_follow_the_softmax_of_what_is_left(filters, by):
    num_draws = 40_000
    logits = torch.randn(1, 24, generator=torch.Generator().manual_seed(3)) * 1.5
    chosen = parameters(num_draws, seed=11, **filters)
    if by == "seed":
        chosen.offsets.fill_(4)
        chosen.seeds.copy_(torch.arange(num_draws))
    drawn = sample(logits.expand(num_draws, -1).contiguous(), chosen).token_ids.numpy()
    left = reference.filtered(
        logits[0].numpy() / np.float32(filters.get("temperature", 1.0)),
        filters.get("top_k", 0),
        filters.get("top_p", 1.0),
        filters.get("min_p", 0.0),
    )
    probabilities = np.exp(left.astype(np.float64) - left.max())
    counts = np.bincount(drawn, minlength=24)
    assert counts[probabilities == 0].sum() == 0
    statistic, bound = chi_square(counts, probabilities / probabilities.sum())
    assert statistic < bound


def test_draws_at_successive_offsets_are_independent():
    logits = torch.tensor([[0.5, 0.0, -1.0, 1.0]])
    drawn = sample(logits.expand(40_000, -1).contiguous(), parameters(40_000, seed=1)).token_ids.numpy()
    single = torch.softmax(logits[0].double(), 0).numpy()
    counts = np.bincount(drawn[0::2] * 4 + drawn[1::2], minlength=16)
    statistic, bound = chi_square(counts, np.outer(single, single).reshape(-1))
    assert statistic < bound


def test_greedy_takes_the_lowest_id_on_ties():
    """A temperature of 0, or one that would overflow."""
    logits = torch.tensor([[1.0, 5.0, 5.0, 2.0], [7.0, 7.0, 7.0, 7.0]])
    assert sample(logits, parameters(2, temperature=0.0)).token_ids.tolist() == [1, 0]
    assert sample(logits, parameters(2, temperature=9e-6)).token_ids.tolist() == [1, 0]


def test_logits_beyond_float32_once_scaled_are_drawn_greedily():
    logits = torch.tensor([[1e35, 3e35, 2e35]])
    for filters in ({}, {"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.5}):
        chosen = parameters(1, temperature=1e-4, **filters)
        assert sample(logits, chosen).token_ids.tolist() == [1]
        assert reference.sample(logits, chosen).token_ids.tolist() == [1]


def drawn_set(logits, **filters):
    """All tokens that 500 draws bring up."""
    rows = torch.tensor([logits] * 500)
    return set(sample(rows, parameters(500, **filters)).token_ids.tolist())


def test_top_k_keeps_all_that_tie_with_the_last():
    assert drawn_set([3.0, 2.0, 2.0, 2.0, 1.0], top_k=2) == {0, 1, 2, 3}


def test_top_p_keeps_the_lower_ids_of_a_tie():
    """Four equal tokens, of which a mass of 0.6 takes three."""
    assert drawn_set([1.0, 1.0, 1.0, 1.0], top_p=0.6) == {0, 1, 2}
    assert drawn_set([0.0, 1.0, 1.0, 1.0], top_p=0.4) == {1, 2}


def test_top_p_is_a_share_of_what_top_k_left():
    """Of 0.5, 0.3, 0.2 the first two are left with 0.625 and 0.375: a mass of 0.6 is reached by the first."""
    logits = [float(np.log(share)) for share in (0.5, 0.3, 0.2)]
    assert drawn_set(logits, top_k=2, top_p=0.6) == {0}
    assert drawn_set(logits, top_p=0.6) == {0, 1}


def test_min_p_is_a_share_of_the_likeliest():
    """Half of 0.5 keeps 0.3, not 0.2."""
    assert drawn_set([float(np.log(share)) for share in (0.5, 0.3, 0.2)], min_p=0.5) == {0, 1}


def test_filters_that_leave_one_token_give_it():
    """top_k = 1, min_p = 1 and a tiny top_p are greedy."""
    logits = [0.0, 3.0, 2.9]
    for filters in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}):
        assert drawn_set(logits, **filters) == {1}


def test_a_row_draws_the_same_alone_and_in_any_batch():
    logits = random_logits(9, 101)
    chosen = parameters(9, seed=42, top_p=0.95)
    together = sample(logits, chosen).token_ids
    for row in range(9):
        alone = parameters(1, seed=42, top_p=0.95, offsets=torch.tensor([row], dtype=torch.int32))
        assert sample(logits[row : row + 1].clone(), alone).token_ids[0] == together[row]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_is_marked_and_others_are_not(bad, temperature):
    logits = random_logits(3, 50)
    clean = sample(logits, parameters(3, temperature=temperature))
    logits[1, 49] = bad
    marked = sample(logits, parameters(3, temperature=temperature, num_logprobs=2))
    assert marked.outcomes.tolist() == [SampleOutcome.DRAWN, SampleOutcome.NOT_FINITE, SampleOutcome.DRAWN]
    assert torch.equal(marked.token_ids[[0, 2]], clean.token_ids[[0, 2]])


@pytest.mark.parametrize("num_logprobs", [0, 1, 5, 60])
def test_logprobs_are_of_the_distribution_before_temperature_and_filters(num_logprobs):
    logits = random_logits(4, 37)
    chosen = parameters(4, temperature=0.5, top_k=3, num_logprobs=num_logprobs)
    ours, expected = sample(logits, chosen), reference.sample(logits, chosen)
    torch.testing.assert_close(ours.logprobs, expected.logprobs, rtol=0, atol=2e-6)
    assert torch.equal(ours.top_token_ids, expected.top_token_ids)
    torch.testing.assert_close(ours.top_logprobs, expected.top_logprobs, rtol=0, atol=2e-6)


def test_logprobs_of_given_tokens_are_those_of_the_softmax():
    """Against float64; the best ones beside them."""
    logits = random_logits(3, 50)
    given, wanted = torch.tensor([0, 49, 7], dtype=torch.int32), torch.tensor([2, 2, 2], dtype=torch.int32)
    taken = token_logprobs(logits, given, wanted)
    expected = torch.log_softmax(logits.double(), dim=-1)
    torch.testing.assert_close(taken.logprobs.double(), expected[range(3), given.long()], rtol=0, atol=2e-6)
    torch.testing.assert_close(taken.top_logprobs.double(), expected.topk(2).values, rtol=0, atol=2e-6)


def test_logprobs_of_a_row_that_is_not_finite_are_no_number():
    """So that whoever reads them knows."""
    logits = random_logits(2, 8)
    logits[1, 3] = float("nan")
    zero = torch.zeros(2, dtype=torch.int32)
    assert token_logprobs(logits, zero, zero).logprobs.isnan().tolist() == [False, True]


def test_logprobs_of_a_token_beyond_the_vocabulary_are_refused():
    one = torch.ones(1, dtype=torch.int32)
    with pytest.raises(KernelArgumentError, match="token_ids must be 0 to 7"):
        token_logprobs(torch.zeros(1, 8), one * 8, one)


def test_rows_get_as_many_logprobs_as_each_asked_for():
    logits = random_logits(3, 10)
    chosen = parameters(3)
    chosen.num_logprobs.copy_(torch.tensor([-1, 3, 1]))
    ours, expected = sample(logits, chosen), reference.sample(logits, chosen)
    assert ours.top_token_ids.shape == (3, 3)
    assert torch.equal(ours.top_token_ids[1], expected.top_token_ids[1])
    assert torch.equal(ours.top_token_ids[2, :1], expected.top_token_ids[2, :1])


def test_a_caller_can_say_how_wide_the_table_of_logprobs_is():
    """Rows that ask for more get as many; below 0 there are none."""
    logits, chosen = random_logits(2, 10), parameters(2, num_logprobs=3)
    narrow = sample(logits, chosen, max_logprobs=2)
    assert torch.equal(narrow.top_token_ids, sample(logits, chosen).top_token_ids[:, :2])
    assert token_logprobs(logits, narrow.token_ids, chosen.num_logprobs, max_logprobs=5).top_logprobs.shape == (2, 5)
    assert sample(logits, chosen, max_logprobs=-1).top_token_ids.shape == (2, 0)


def test_no_rows_give_no_tokens():
    assert sample(torch.zeros(0, 8), parameters(0)).token_ids.shape == (0,)


def test_a_column_of_another_length_is_refused():
    with pytest.raises(KernelArgumentError, match="temperature must have shape"):
        sample(torch.zeros(2, 8), parameters(3))

"""sample and token_logprobs by ranks that each have a part of every row's logits."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_rig.draws import FOUR_ROWS, masks, parameters, rules
from kernel_rig.tensors import int32, placed, random_logits
from kernel_rig.turns import by_ranks
from paceline_kernels.errors import KernelArgumentError
from paceline_kernels.sampling import SampleOutcome, VocabularySlice, reference, sample, token_logprobs

VOCAB = 97
ANY_RULES = st.fixed_dictionaries(
    {},
    optional={
        "allowed": st.sets(st.integers(0, 96), min_size=1).map(sorted),
        "forbidden": st.lists(st.integers(0, 96), max_size=50),
        "biased": st.sets(st.integers(0, 96)).map(sorted),
        "prompt": st.lists(st.integers(0, 96), max_size=9),
        "output": st.lists(st.integers(0, 96), max_size=30),
        "frequency": st.sampled_from([0.5, -0.5]),
        "repetition": st.sampled_from([1.3, 0.8]),
    },
)
ANY_LOGITS = st.sampled_from(["random", "with ties", "all tie", "low", "bad in a part", "-inf in a part"])


def logits_of(kinds, vocab_size, seed):
    """A row of each kind."""
    logits = random_logits(len(kinds), vocab_size, seed, 3.0)
    changes = {"with ties": logits.round(), "all tie": 0 * logits - 0.0, "low": logits - 1e6}
    bad = np.random.default_rng(seed).integers(vocab_size)
    for row, kind in enumerate(kinds):
        logits[row] = changes.get(kind, logits)[row]
        if kind.endswith("in a part"):
            logits[row, bad] = float("-inf" if kind.startswith("-") else "nan")
    return logits


@settings(deadline=None)
@given(
    kinds=st.lists(ANY_LOGITS, min_size=4, max_size=4),
    rows=FOUR_ROWS,
    ruled=st.one_of(st.none(), st.lists(ANY_RULES, min_size=4, max_size=4)),
    unmasked=st.none() | st.lists(st.none() | st.sets(st.integers(0, 96), min_size=1), min_size=4, max_size=4),
    num_logprobs=st.lists(st.sampled_from([-1, 0, 3, 60, 200]), min_size=4, max_size=4),
    cuts=st.lists(st.integers(0, 24).map(lambda cut: 4 * cut), max_size=3).map(sorted),
    seed=st.integers(0, 1000),
)
def test_ranks_that_share_a_vocabulary_find_what_one_rank_finds(kinds, rows, ruled, unmasked, num_logprobs, cuts, seed):
    """To the bit, and all of them: wherever it is cut, with ties and filters over the cuts, and with empty parts."""
    logits, chosen, chosen_rules = logits_of(kinds, VOCAB, seed), parameters(rows), ruled and rules(*ruled)
    changes = chosen_rules, unmasked and masks(VOCAB, *unmasked)
    chosen.num_logprobs.copy_(int32(*num_logprobs))
    given_ids = torch.randint(VOCAB, (4,), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))
    alone = sample(logits, chosen, *changes)
    alone_of_given = token_logprobs(logits, given_ids, chosen.num_logprobs)
    bounds = [0, *cuts, VOCAB]

    def work(rank, gather):
        part = logits[:, bounds[rank] : bounds[rank + 1]].contiguous()
        vocabulary = VocabularySlice(VOCAB, bounds[rank], rank, gather)
        samples = sample(part, chosen, *changes, vocabulary=vocabulary)
        return samples, token_logprobs(part, given_ids, chosen.num_logprobs, vocabulary=vocabulary)

    is_drawn = alone.outcomes == SampleOutcome.DRAWN
    expected = reference.sample(logits, parameters(rows), *changes)
    assert torch.equal(alone.outcomes, expected.outcomes)
    assert torch.equal(alone.token_ids[is_drawn], expected.token_ids[is_drawn])
    for samples, of_given in by_ranks(len(bounds) - 1, work):
        assert torch.equal(samples.token_ids, alone.token_ids)
        assert torch.equal(samples.outcomes, alone.outcomes)
        assert_same_logprobs(samples, alone, num_logprobs)
        assert_same_logprobs(of_given, alone_of_given, num_logprobs)


def assert_same_logprobs(ours, expected, num_logprobs):
    """Bit by bit, of what each row asked for."""
    for row in (row for row, count in enumerate(num_logprobs) if count >= 0):
        assert ours.logprobs[row].view(torch.int32) == expected.logprobs[row].view(torch.int32)
        if not expected.logprobs[row].isnan():  # where a logit is no number none is the best
            best = slice(num_logprobs[row])
            assert torch.equal(ours.top_token_ids[row, best], expected.top_token_ids[row, best])
            assert torch.equal(ours.top_logprobs[row, best], expected.top_logprobs[row, best])


def test_what_a_gpu_does_not_cut_is_refused(gpu, place):
    one, chosen, vocabulary = place(int32(1)), placed(place, parameters([{}])), VocabularySlice(8)
    refused = "vocabulary must be None on a GPU"
    with pytest.raises(KernelArgumentError, match=refused):
        sample(place(torch.zeros(1, 8)), chosen, max_logprobs=-1, vocabulary=vocabulary)
    with pytest.raises(KernelArgumentError, match=refused):
        token_logprobs(place(torch.zeros(1, 8)), one, one, max_logprobs=0, vocabulary=vocabulary)

"""Rules of sample: masks, biases and penalties equal their reference, keep their order and leave other rows alone."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline_kernels.compiler import jit
from paceline_kernels.errors import KernelArgumentError
from paceline_kernels.sampling import (
    LogitRules,
    SampleOutcome,
    SamplingParameters,
    TokenLists,
    reference,
    sample,
)
from paceline_kernels.sampling.rules import rule_arrays, ruled


def greedy(num_rows, temperature=0.0):
    """Every row alike; offsets count up."""
    one = torch.ones(num_rows)
    none = torch.zeros(num_rows, dtype=torch.int32)
    offsets = torch.arange(num_rows, dtype=torch.int32)
    return SamplingParameters(one * temperature, none, one, one * 0, none.long(), offsets, none - 1)


def lists(*rows):
    """A list of tokens per row."""
    ends = np.cumsum([0, *map(len, rows)])
    tokens = [token for row in rows for token in row]
    return TokenLists(torch.tensor(ends, dtype=torch.int32), torch.tensor(tokens, dtype=torch.int32))


def rules(num_rows=1, *, presence=0.0, frequency=0.0, repetition=1.0, biases=(), **named):
    """Rules for every row alike, of the lists that are named."""
    named = {name: lists(*([tokens] * num_rows)) for name, tokens in named.items()}
    named = {name: lists(*([()] * num_rows)) for name in ("allowed", "forbidden", "biased", "prompt", "output")} | named
    one = torch.ones(num_rows)
    return LogitRules(
        **named,
        biases=torch.tensor(list(biases) * num_rows, dtype=torch.float32),
        presence_penalty=one * presence,
        frequency_penalty=one * frequency,
        repetition_penalty=one * repetition,
    )


@jit.compiled_for_python
def first_ruled(logits, arrays):
    """The rules of the first row applied to logits."""
    return ruled(logits, np.int64(0), arrays)


def after(logits, chosen):
    """What the compiled rules make of one row."""
    return first_ruled(np.array(logits, dtype=np.float32), rule_arrays(chosen, len(logits)))


TOKENS = st.lists(st.integers(0, 18), max_size=12)


@given(
    allowed=st.sets(st.integers(0, 18)),
    forbidden=TOKENS,
    biased=st.dictionaries(st.integers(0, 18), st.floats(-100, 100, width=32)),
    presence=st.floats(-2, 2, width=32),
    frequency=st.floats(-2, 2, width=32),
    repetition=st.sampled_from([0.01, 0.9, 1.0, 1.1, 10.0]),
    prompt=TOKENS,
    output=TOKENS,
)
def test_rules_equal_their_reference_to_the_bit(
    allowed, forbidden, biased, presence, frequency, repetition, prompt, output
):
    logits = np.random.default_rng(0).normal(size=19).astype(np.float32) * 4
    chosen = rules(
        allowed=sorted(allowed),
        forbidden=forbidden,
        biased=list(biased),
        biases=biased.values(),
        presence=presence,
        frequency=frequency,
        repetition=repetition,
        prompt=prompt,
        output=output,
    )
    assert after(logits, chosen).tolist() == reference.ruled(logits, chosen, 0).tolist()


def test_rows_with_rules_equal_the_reference_beside_rows_without():
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(1)) * 2
    chosen = LogitRules(
        allowed=lists([], range(50), [], [7]),
        forbidden=lists([3], [1, 2], [], []),
        biased=lists([], [8, 9], [], []),
        biases=torch.tensor([4.0, -4.0]),
        presence_penalty=torch.tensor([0.0, 0.5, 0.0, 0.0]),
        frequency_penalty=torch.tensor([0.0, 0.5, 0.0, 1.0]),
        repetition_penalty=torch.tensor([1.0, 1.2, 1.0, 1.0]),
        prompt=lists([], [1, 1, 30], [], []),
        output=lists([], [31, 31, 30], [], [7, 7]),
    )
    ours, expected = sample(logits, greedy(4, 1.0), chosen), reference.sample(logits, greedy(4, 1.0), chosen)
    assert torch.equal(ours.token_ids, expected.token_ids)
    assert ours.token_ids[2] == sample(logits, greedy(4, 1.0)).token_ids[2]
    assert ours.token_ids[3] == 7


def test_penalties_count_as_documented():
    logits = [2.0, -2.0, 2.0, 2.0, 0.0]
    chosen = rules(prompt=[0, 1, 0], output=[2, 2, 4], repetition=2.0, frequency=0.5, presence=0.25)
    assert after(logits, chosen).tolist() == [1.0, -4.0, 1.0 - 1.0 - 0.25, 2.0, -0.75]


def test_biases_come_before_penalties():
    """A logit that the bias lifts above 0 is divided, not multiplied."""
    assert after([-1.0], rules(biased=[0], biases=[3.0], output=[0], repetition=2.0)).tolist() == [1.0]


def test_nothing_lifts_a_masked_token():
    """Neither a bias nor a negative penalty."""
    chosen = rules(forbidden=[0], biased=[0], biases=[100.0], output=[0], frequency=-2.0, repetition=0.5)
    assert after([1.0, 2.0], chosen).tolist() == [-np.inf, 2.0]


def test_an_allowed_token_can_be_forbidden():
    assert after([1.0, 2.0, 3.0], rules(allowed=[1, 2], forbidden=[2])).tolist() == [-np.inf, 2.0, -np.inf]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_token_left_is_marked_and_others_are_drawn(temperature):
    chosen = rules(2, allowed=[2, 3])
    chosen = LogitRules(
        **{name: getattr(chosen, name) for name in LogitRules.__slots__ if name != "forbidden"},
        forbidden=lists([2, 3], [2]),
    )
    samples = sample(torch.randn(2, 8), greedy(2, temperature), chosen)
    assert samples.outcomes.tolist() == [SampleOutcome.NOTHING_LEFT, SampleOutcome.DRAWN]
    assert samples.token_ids[1] == 3


def test_logprobs_stay_those_of_the_raw_distribution():
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    parameters = greedy(1)
    parameters.num_logprobs.fill_(1)
    samples = sample(logits, parameters, rules(allowed=[0]))
    expected = torch.log_softmax(logits, dim=-1)[0]
    assert samples.token_ids.tolist() == [0]
    torch.testing.assert_close(samples.logprobs, expected[:1])
    assert samples.top_token_ids.tolist() == [[2]]
    assert logits.tolist() == [[1.0, 2.0, 3.0]]


def test_samples_follow_the_softmax_of_the_changed_logits():
    """A bias, penalties and a mask, over 20,000 draws; Pearson's bound is exceeded once in about 30,000 times."""
    num_draws = 20_000
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(3))
    one = {"biased": [4], "biases": [1.5], "forbidden": [0], "output": [5, 5, 6], "prompt": [7]}
    penalties = {"frequency": 0.6, "presence": 0.4, "repetition": 1.5}
    drawn = sample(
        logits.expand(num_draws, -1).contiguous(), greedy(num_draws, 1.0), rules(num_draws, **one, **penalties)
    )
    left = reference.ruled(logits[0].numpy(), rules(**one, **penalties), 0).astype(np.float64)
    expected = num_draws * np.exp(left) / np.exp(left).sum()
    counts = np.bincount(drawn.token_ids.numpy(), minlength=12)
    assert counts[0] == 0
    degrees = 10
    bound = degrees * (1 - 2 / (9 * degrees) + 4 * (2 / (9 * degrees)) ** 0.5) ** 3
    assert float(((counts[1:] - expected[1:]) ** 2 / expected[1:]).sum()) < bound


@pytest.mark.parametrize(
    ("chosen", "problem"),
    [
        (rules(forbidden=[8]), "forbidden.token_ids must be 0 to 7"),
        (rules(output=[-1], presence=1.0), "output.token_ids must be 0 to 7"),
        (rules(2, allowed=[1]), r"allowed.cu_lens must have shape \[2\]"),
        (rules(biased=[1]), "biases must have shape"),
    ],
)
def test_lists_that_compiled_code_could_not_bear_are_refused(chosen, problem):
    with pytest.raises(KernelArgumentError, match=problem):
        sample(torch.zeros(1, 8), greedy(1), chosen)

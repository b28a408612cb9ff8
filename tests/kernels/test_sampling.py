"""sample: the draw that is defined, token for token, with rules and without; ties, log-probabilities and bad logits.

On a GPU another token is drawn only where two are as good as equal. As good as equal are scores, and a score or a mass
and the border of a filter, less than 1e-5 apart.
"""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_rig.draws import FOUR_ROWS, OFF, masks, parameters, rules
from kernel_rig.tensors import int32, placed, random_logits
from paceline_kernels.errors import KernelArgumentError
from paceline_kernels.gpu import architecture
from paceline_kernels.sampling import (
    SampleOutcome,
    reference,
    sample,
    token_logprobs,
)

slow = pytest.mark.slow
CLOSE = 1e-5
GREEDY = {"temperature": 0.0}
FILTERS = [
    {},
    GREEDY,
    {"temperature": 0.7, "seed": -1},
    {"top_p": 0.9},
    {"top_p": 0.05, "temperature": 3.0},
    {"top_p": 1e-45},
    {"top_k": 5},
    {"min_p": 0.05},
    {"min_p": 0.001, "top_k": 40, "top_p": 0.7, "temperature": 1.3},
]


@pytest.fixture(autouse=True)
def _small_launch(is_gpu, request, monkeypatch):
    """So that on a GPU few tokens are several chunks, and more than are searched at a time."""
    if not is_gpu:
        return
    from paceline_kernels.sampling import triton as kernels

    here = architecture.current()
    launch = dataclasses.replace(kernels.LAUNCHES[here], survey_segments=4, chunk=1, capacity=64, rule_block=128)
    monkeypatch.setitem(kernels.LAUNCHES, here, launch)
    if request.getfixturevalue("device").type == "cpu":
        from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

        def fma(_builder, x, y, z):
            """The interpreter rounds a fused multiply-add twice, a GPU once."""
            return TensorHandle((x.data * y.data.astype(np.float64) + z.data).astype(np.float32), z.dtype.scalar)

        monkeypatch.setattr(InterpreterBuilder, "create_fma", fma)


def draw(place, logits, rows, chosen_rules=None, num_logprobs=-1, chosen_masks=None):
    """What is drawn from logits, on the CPU."""
    chosen = placed(place, parameters(rows, num_logprobs))
    changes = placed(place, chosen_rules), placed(place, chosen_masks)
    ours = sample(place(logits), chosen, *changes, max_logprobs=num_logprobs)
    return placed(torch.Tensor.cpu, ours)


def kept(scaled, row, widened):
    """Which tokens the filters keep, with all borders moved so far that they keep more, or less."""
    with np.errstate(all="ignore"):
        kept = scaled >= (scaled.max() + np.log(row["min_p"]) - widened)
        if 0 < row["top_k"] < len(scaled):
            kept &= scaled >= np.sort(scaled)[-row["top_k"]] - widened
        order = np.argsort(-scaled, kind="stable")
        masses = np.where(kept, np.exp(scaled - scaled.max()), 0.0)[order]
        before = (masses.cumsum() - masses) / masses.sum()
    if row["top_p"] < 1:
        kept[order[before >= row["top_p"] + widened]] = False
    return kept


def could_be_drawn(logits, row, offset, token):
    """Whether none of the tokens that are clearly kept scores clearly better, and no filter clearly drops this one."""
    if row["temperature"] == 0.0:
        return logits[token] == logits.max()
    scaled = (logits / np.float32(row["temperature"])).astype(np.float64)
    scores = scaled + reference.gumbel_noise(len(logits), row["seed"] % 2**64, offset)
    best = np.where(kept(scaled, row, -CLOSE), scores, -np.inf).max()
    return bool(kept(scaled, row, CLOSE)[token] and scores[token] >= best - CLOSE)


def assert_same_draws(backend, place, logits, rows, chosen_rules=None):
    """Token by token what the reference draws, or on a GPU what it might as well have drawn. Returns our samples."""
    ours = draw(place, logits, rows, chosen_rules)
    expected = reference.sample(logits, parameters(rows), chosen_rules)
    assert torch.equal(ours.outcomes, expected.outcomes)
    pairs = zip(ours.token_ids.tolist(), expected.token_ids.tolist(), strict=True)
    for i, (token, other) in enumerate(pairs):
        if token == other or expected.outcomes[i] != SampleOutcome.DRAWN:
            continue
        left = logits[i].numpy() if chosen_rules is None else reference.ruled(logits[i].numpy(), chosen_rules, i)
        assert backend.is_gpu, (i, rows[i], token, other)
        assert could_be_drawn(left, OFF | rows[i], i, token), (i, rows[i], token, other)
    return ours


def test_the_judge_of_close_calls_accepts_no_other_token():
    scores = random_logits(1, 50)[0].numpy() + reference.gumbel_noise(50, 3, 0)
    accepted = [token for token in range(50) if could_be_drawn(random_logits(1, 50)[0].numpy(), OFF, 0, token)]
    assert accepted == [scores.argmax()]
    close = -reference.gumbel_noise(50, 3, 0)
    close[2:] -= 1
    assert [token for token in range(50) if could_be_drawn(close, OFF, 0, token)] == [0, 1]


@pytest.mark.parametrize("vocab_size", [1, pytest.param(63, marks=slow), pytest.param(129, marks=slow), 600])
def test_every_filter_draws_what_the_reference_draws(backend, place, vocab_size):
    """A row each, at vocabularies that no tile divides; 600 tokens are more than one program surveys."""
    assert_same_draws(backend, place, random_logits(len(FILTERS), vocab_size, vocab_size), FILTERS)


@given(rows=FOUR_ROWS, vocab_size=st.sampled_from([1, 3, 8, 97, 98, 99]))
def test_any_filters_together_draw_what_the_reference_draws_on_a_cpu(rows, vocab_size):
    logits, chosen = random_logits(4, vocab_size, rows[0]["seed"] % 1000), parameters(rows)
    assert torch.equal(sample(logits, chosen).token_ids, reference.sample(logits, chosen).token_ids)


@settings(max_examples=max(1, settings.default.max_examples // 33), deadline=None)  # on a GPU the first one compiles
@given(rows=FOUR_ROWS, vocab_size=st.sampled_from([98, 300]), seed=st.integers(0, 1000))
def test_any_filters_together_draw_what_the_reference_draws_on_a_gpu(gpu, backend, rows, vocab_size, seed):
    with backend.memory() as place:
        assert_same_draws(backend, place, random_logits(4, vocab_size, seed), rows)


def test_a_large_vocabulary_draws_what_the_reference_draws_on_a_cpu():
    """Where noise is drawn for a part of the tokens only."""
    logits = torch.randn(8, 49_152, generator=torch.Generator().manual_seed(0)) * 2
    filters = ({}, {"top_p": 0.95}, {"top_k": 50}, {"temperature": 30.0}, {"temperature": 0.3})
    for seed, filtering in enumerate(filters):
        chosen = parameters([filtering | {"seed": seed}] * 8)
        assert torch.equal(sample(logits, chosen).token_ids, reference.sample(logits, chosen).token_ids)


def test_flat_logits_are_searched_in_parts_on_a_gpu(gpu, backend, place):
    logits = random_logits(3, 160, 1, 0.3)
    logits[2] = 1.0
    filters = [{"top_k": 70}, {"top_k": 120, "top_p": 0.5}, {"top_k": 90, "top_p": 0.99}]
    assert_same_draws(backend, place, logits, filters)


def assert_follows(counts, probabilities):
    """Pearson's statistic is below a bound that a right sampler exceeds once in about 30,000 times.

    The bound is that of Wilson and Hilferty.
    """
    kept = probabilities > 0
    assert counts[~kept].sum() == 0
    expected = counts.sum() * probabilities[kept] / probabilities.sum()
    degrees = int(kept.sum()) - 1
    statistic = float(((counts[kept] - expected) ** 2 / expected).sum())
    assert statistic < degrees * (1 - 2 / (9 * degrees) + 4 * (2 / (9 * degrees)) ** 0.5) ** 3


def drawn_often(logits, chosen, chosen_rules=None):
    """As many tokens as parameters have rows, all of the same logits, by a CPU."""
    num_draws = len(chosen.offsets)
    return sample(logits.expand(num_draws, -1).contiguous(), chosen, chosen_rules).token_ids.numpy()


@pytest.mark.parametrize(
    "filters",
    [{}, {"temperature": 0.7}, {"temperature": 2.5}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.05}],
    ids=str,
)
@pytest.mark.parametrize("by", ["offset", "seed"])
def test_samples_follow_the_softmax_of_what_is_left(filters, by):
    logits = torch.randn(1, 24, generator=torch.Generator().manual_seed(3)) * 1.5
    row = OFF | filters | {"seed": 11}
    chosen = parameters([row] * 40_000)
    if by == "seed":
        chosen.offsets.fill_(4)
        chosen.seeds.copy_(torch.arange(40_000))
    scaled = logits[0].numpy() / np.float32(row["temperature"])
    left = reference.filtered(scaled, row["top_k"], row["top_p"], row["min_p"]).astype(np.float64)
    assert_follows(np.bincount(drawn_often(logits, chosen), minlength=24), np.exp(left - left.max()))


def test_samples_follow_the_softmax_of_what_rules_leave():
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(3))
    row = {"biased": [4], "biases": [1.5], "forbidden": [0], "output": [5, 5, 6], "prompt": [7]}
    row |= {"frequency": 0.6, "presence": 0.4, "repetition": 1.5}
    drawn = drawn_often(logits, parameters([{}] * 20_000), rules(*[row] * 20_000))
    left = reference.ruled(logits[0].numpy(), rules(row), 0).astype(np.float64)
    assert left[0] == -np.inf
    assert_follows(np.bincount(drawn, minlength=12), np.exp(left))


def test_draws_at_successive_offsets_are_independent():
    logits = torch.tensor([[0.5, 0.0, -1.0, 1.0]])
    drawn = drawn_often(logits, parameters([{"seed": 1}] * 40_000))
    single = torch.softmax(logits[0].double(), 0).numpy()
    assert_follows(np.bincount(drawn[0::2] * 4 + drawn[1::2], minlength=16), np.outer(single, single).reshape(-1))


@pytest.mark.parametrize("temperature", [0.0, 9e-6])
def test_greedy_takes_the_lowest_id_on_ties(backend, place, temperature):
    """Also at a temperature that would overflow."""
    logits = torch.zeros(2, 300)
    logits[0, [150, 299]] = 5.0
    assert assert_same_draws(backend, place, logits, [{"temperature": temperature}] * 2).token_ids.tolist() == [150, 0]


def test_logits_beyond_float32_once_scaled_are_drawn_greedily(backend, place):
    rows = [{"temperature": 1e-4} | filters for filters in ({}, {"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.5})]
    logits = torch.linspace(-1e35, 2e35, 300).repeat(4, 1)
    logits[:, 7] = 3e35
    assert assert_same_draws(backend, place, logits, rows).token_ids.tolist() == [7] * 4


NEVER = 1e-30  # as good as never drawn
SHARES_FILTERS_AND_WHAT_IS_LEFT = {
    "top_k keeps all that tie with the last": ([0.5, 0.2, 0.2, 0.2, 0.1], {"top_k": 2}, {0, 1, 2, 3}),
    "top_p keeps the lower ids of a tie": ([0.25] * 4, {"top_p": 0.6}, {0, 1, 2}),
    "top_p keeps the lower ids behind others": ([0.1, 0.3, 0.3, 0.3], {"top_p": 0.4}, {1, 2}),
    # Of the first two, which are left with 0.625 and 0.375, the first reaches a mass of 0.6.
    "top_p is a share of what top_k left": ([0.5, 0.3, 0.2], {"top_k": 2, "top_p": 0.6}, {0}),
    "top_p alone is a share of all": ([0.5, 0.3, 0.2], {"top_p": 0.6}, {0, 1}),
    "min_p is a share of the likeliest": ([0.5, 0.3, 0.2], {"min_p": 0.5}, {0, 1}),
    "top_k of 1 is greedy": ([0.1, 0.5, 0.4], {"top_k": 1}, {1}),
    "min_p of 1 is greedy": ([0.1, 0.5, 0.4], {"min_p": 1.0}, {1}),
    "a tiny top_p is greedy": ([0.1, 0.5, 0.4], {"top_p": 1e-6}, {1}),
}


def test_filters_leave_what_they_say(backend, place):
    """Often enough on a CPU that all of them are drawn."""
    shares, filters, left = zip(*SHARES_FILTERS_AND_WHAT_IS_LEFT.values(), strict=True)
    num_draws = 1 if backend.is_gpu else 500
    padded = torch.tensor([row + [NEVER] * (5 - len(row)) for row in shares], dtype=torch.float64)
    logits = padded.log().float().repeat_interleave(num_draws, dim=0)
    rows = [row for row in filters for _ in range(num_draws)]
    drawn = assert_same_draws(backend, place, logits, rows).token_ids.view(len(left), num_draws)
    for name, tokens, wanted in zip(SHARES_FILTERS_AND_WHAT_IS_LEFT, drawn.tolist(), left, strict=True):
        assert set(tokens) <= wanted, name
        assert set(tokens) == wanted or backend.is_gpu, name


def test_a_row_draws_the_same_alone_and_in_a_batch(place):
    logits, rows = random_logits(3, 129), [{"seed": 42, "min_p": 0.05, "top_p": 0.95}] * 3
    together = draw(place, logits, rows, num_logprobs=2)
    chosen = parameters(rows, 2)
    for row in (0, 2):
        mine = placed(lambda column, row=row: place(column[row : row + 1]), chosen)
        alone = sample(place(logits[row : row + 1]), mine, max_logprobs=2)
        for field in dataclasses.fields(alone):
            assert torch.equal(getattr(alone, field.name)[0].cpu(), getattr(together, field.name)[row]), field.name


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_is_marked_and_others_are_not(backend, place, bad):
    logits = random_logits(4, 200)
    logits[0, 199] = logits[1, 0] = bad
    samples = assert_same_draws(backend, place, logits, [GREEDY, {"top_p": 0.9}, {}, GREEDY])
    not_finite, drawn = SampleOutcome.NOT_FINITE, SampleOutcome.DRAWN
    assert samples.outcomes.tolist() == [not_finite, not_finite, drawn, drawn]


@functools.cache
def compiled_rules():
    """What compiled code makes of the first row, for Python."""
    from paceline_kernels.compiler import jit
    from paceline_kernels.sampling.rules import ruled

    @jit.compiled_for_python
    def first_ruled(logits, arrays):
        return ruled(logits, 0, np.int64(0), arrays)

    return first_ruled


def after(backend, logits, row, unmasked=None):
    """What mask and rules make of one row of logits: to the bit what the reference makes of it."""
    logits, chosen, chosen_masks = np.array(logits, dtype=np.float32), rules(row), masks(len(logits), unmasked)
    if backend.is_gpu:
        from paceline_kernels.sampling import triton as kernels

        with backend.memory() as place:
            draws = kernels._rows("sample", place(torch.from_numpy(logits)[None]))
            changes = placed(place, chosen), placed(place, chosen_masks)
            ruled, is_ruled = kernels._apply(*changes, place(int32(0)), draws)
            left = ruled[0].cpu().numpy() if is_ruled[0] else logits
    else:
        from paceline_kernels.sampling.rules import rule_arrays

        left = compiled_rules()(logits, rule_arrays(chosen, chosen_masks, 1, len(logits)))
    assert left.tolist() == reference.ruled(reference.masked(logits, chosen_masks, 0), chosen, 0).tolist()
    return left.tolist()


TOKENS = st.lists(st.integers(0, 18), max_size=12)


@settings(deadline=None)  # on a GPU the first one compiles
@given(
    unmasked=st.none() | st.sets(st.integers(0, 18)),
    allowed=st.sets(st.integers(0, 18)).map(sorted),
    forbidden=TOKENS,
    biased=st.dictionaries(st.integers(0, 18), st.floats(-100, 100, width=32)),
    presence=st.floats(-2, 2, width=32),
    frequency=st.floats(-2, 2, width=32),
    repetition=st.sampled_from([0.01, 0.9, 1.0, 1.1, 10.0]),
    prompt=TOKENS,
    output=TOKENS,
)
def test_masks_and_rules_equal_their_reference_to_the_bit(backend, unmasked, biased, **row):
    logits = np.random.default_rng(0).normal(size=19).astype(np.float32) * 4
    after(backend, logits, row | {"biased": list(biased), "biases": list(biased.values())}, unmasked)


@pytest.mark.parametrize(
    ("logits", "row", "left"),
    [
        pytest.param(
            [2.0, -2.0, 2.0, 2.0, 0.0],
            {"prompt": [0, 1, 0], "output": [2, 2, 4], "repetition": 2.0, "frequency": 0.5, "presence": 0.25},
            [1.0, -4.0, 1.0 - 1.0 - 0.25, 2.0, -0.75],
            id="penalties count as documented",
        ),
        pytest.param(
            [-1.0],
            {"biased": [0], "biases": [3.0], "output": [0], "repetition": 2.0},
            [1.0],
            id="biases come before penalties: what they lift above 0 is divided, not multiplied",
        ),
        pytest.param(
            [1.0, 2.0],
            {"forbidden": [0], "biased": [0], "biases": [100.0], "output": [0], "frequency": -2.0, "repetition": 0.5},
            [-np.inf, 2.0],
            id="neither a bias nor a negative penalty lifts a masked token",
        ),
        pytest.param(
            [1.0, 2.0, 3.0],
            {"allowed": [1, 2], "forbidden": [2]},
            [-np.inf, 2.0, -np.inf],
            id="an allowed token can be forbidden",
        ),
    ],
)
def test_rules_leave_what_they_say(backend, logits, row, left):
    assert after(backend, logits, row) == left


def test_rows_with_rules_draw_what_the_reference_draws_beside_rows_without(backend, place):
    """Each of them, all together, lists longer than a program's turn, tokens again and again, and rows without any."""
    many = [5, 6, 5, 130, 5, 9, 11, 130, 131, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 5]
    many *= 8
    history = {"prompt": [*range(40, 90), 5] * 3, "output": many, "presence": 0.5, "frequency": 0.05, "repetition": 1.3}
    rows = [
        {},
        {"allowed": [7, 149, 30]},
        {"forbidden": [*range(20), 3]},
        {"biased": [149, 0, 77]},
        history,
        {"output": many, "frequency": 0.2},
        history | {"allowed": [5, 40, 130, 140], "forbidden": [40], "biased": [130, 5]},
        {"allowed": [3], "forbidden": [3]},
    ]
    logits = random_logits(len(rows), 150)
    samples = assert_same_draws(backend, place, logits, [GREEDY] * len(rows), rules(*rows))
    assert samples.outcomes.tolist() == [SampleOutcome.DRAWN] * 7 + [SampleOutcome.NOTHING_LEFT]
    assert samples.token_ids[0] == logits[0].argmax()
    assert_same_draws(backend, place, logits[3:], [{"top_p": 0.9, "top_k": 5}] * 5, rules(*rows[3:]))


def test_masked_rows_draw_what_their_masks_leave_beside_rows_without(backend, place):
    """Whole words, parts of words and the last token; every other row as without masks, its log-probabilities too."""
    unmasked = [None, range(150), {149}, {31, 32, 64, 95}, None, range(3, 140), (), None]
    logits, rows = random_logits(len(unmasked), 150), [{"top_p": 0.9, "top_k": 20}] * len(unmasked)
    chosen = masks(150, *unmasked)
    ours, plain = draw(place, logits, rows, None, 3, chosen), draw(place, logits, rows, None, 3)
    expected = reference.sample(logits, parameters(rows, 3), None, chosen)
    assert ours.outcomes.tolist() == [SampleOutcome.DRAWN] * 6 + [SampleOutcome.NOTHING_LEFT, SampleOutcome.DRAWN]
    assert torch.equal(ours.token_ids, expected.token_ids)
    assert torch.equal(ours.top_logprobs, plain.top_logprobs)
    kept = [0, 1, 4, 7]
    assert torch.equal(ours.token_ids[kept], plain.token_ids[kept])
    for tokens, token in zip(unmasked[1:6], ours.token_ids[1:6].tolist(), strict=True):
        assert tokens is None or token in tokens


def test_masks_and_lists_of_allowed_tokens_both_count(place):
    both = rules({"allowed": [3, 40]}, {"allowed": [3], "biased": [3], "biases": [9.0]})
    samples = draw(place, torch.ones(2, 50), [GREEDY] * 2, both, chosen_masks=masks(50, {0, 40}, {0, 40}))
    assert samples.outcomes.tolist() == [SampleOutcome.DRAWN, SampleOutcome.NOTHING_LEFT]
    assert samples.token_ids[0] == 40


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_token_left_is_marked_and_others_are_drawn(place, temperature):
    chosen = rules({"allowed": [2, 3], "forbidden": [2, 3]}, {"allowed": [2, 3], "forbidden": [2]})
    samples = draw(place, random_logits(2, 8), [{"temperature": temperature}] * 2, chosen)
    assert samples.outcomes.tolist() == [SampleOutcome.NOTHING_LEFT, SampleOutcome.DRAWN]
    assert samples.token_ids[1] == 3


def test_a_token_beyond_the_vocabulary_changes_nothing_on_a_gpu(gpu, place):
    chosen = rules({"forbidden": [-1, 150, 2**31 - 1], "output": [150, 7], "presence": 0.5})
    assert draw(place, torch.linspace(0, 1, 150)[None], [GREEDY], chosen).token_ids.tolist() == [149]


@pytest.mark.parametrize("num_logprobs", [0, pytest.param(1, marks=slow), 5, 60])
def test_logprobs_are_of_the_distribution_before_temperature_filters_and_rules(place, num_logprobs):
    logits, rows = random_logits(3, 37), [FILTERS[2], FILTERS[5], {"temperature": 0.5, "top_k": 3}]
    before, forbidden = logits.clone(), rules({"forbidden": [int(logits[0].argmax())]}, {}, {})
    ours = draw(place, logits, rows, forbidden, num_logprobs)
    expected = reference.sample(logits, parameters(rows, num_logprobs), forbidden)
    assert torch.equal(ours.token_ids, expected.token_ids)
    assert torch.equal(ours.top_token_ids, expected.top_token_ids)
    torch.testing.assert_close(ours.logprobs, expected.logprobs, rtol=0, atol=2e-6)
    torch.testing.assert_close(ours.top_logprobs, expected.top_logprobs, rtol=0, atol=2e-6)
    assert torch.equal(logits, before)


def test_logprobs_of_given_tokens_are_those_of_the_softmax(place):
    """Over several segments, with ties. A row that asked for none is left as it was."""
    logits = random_logits(4, 300, 2, 0.5)
    logits[1] = -2.0
    given, wanted = int32(0, 299, 150, 5), int32(7, 7, 3, -1)
    taken = token_logprobs(place(logits), place(given), place(wanted), max_logprobs=7)
    expected = torch.log_softmax(logits.double(), dim=-1)
    best = torch.sort(expected, dim=-1, descending=True, stable=True)
    for row, count in enumerate((7, 7, 3)):
        assert taken.top_token_ids[row, :count].tolist() == best.indices[row, :count].tolist()
        assert taken.logprobs[row].item() == pytest.approx(expected[row, given[row]].item(), abs=2e-6)
        assert taken.top_logprobs[row, :count].tolist() == pytest.approx(best.values[row, :count].tolist(), abs=2e-6)
    assert taken.logprobs[3].isnan()


def test_logprobs_of_a_row_that_is_not_finite_are_no_number(place):
    """So that whoever reads them knows. What can never be drawn is none of it."""
    logits = random_logits(4, 200)
    logits[0, 3], logits[1, 150], logits[2, 0] = float("nan"), float("inf"), float("-inf")
    taken = token_logprobs(place(logits), place(int32(0, 0, 0, 0)), place(int32(2, 2, 2, 2)), max_logprobs=2)
    assert taken.logprobs.isnan().tolist() == [True, True, False, False]
    assert taken.logprobs[2] == float("-inf")
    assert taken.top_logprobs.isnan().all(dim=1).tolist() == [True, True, False, False]


def test_logprobs_of_a_token_beyond_the_vocabulary_are_no_number_on_a_gpu(gpu, place):
    one = place(int32(1))
    taken = token_logprobs(place(torch.zeros(1, 8)), place(int32(8)), one, max_logprobs=1)
    assert taken.logprobs.isnan().all()
    assert not taken.top_logprobs.isnan().any()


def test_rows_get_as_many_logprobs_as_each_asked_for(place):
    """The table is as wide as the caller says: rows that ask for more get as many; below 0 there are none."""
    logits, chosen = random_logits(3, 10), parameters([GREEDY] * 3, 3)
    expected = reference.sample(logits, chosen)
    chosen.num_logprobs.copy_(int32(-1, 3, 1))
    for width in (2, 3, 5):
        ours = sample(place(logits), placed(place, chosen), max_logprobs=width)
        assert ours.top_token_ids.shape == (3, width)
        assert torch.equal(ours.top_token_ids[1, :3].cpu(), expected.top_token_ids[1, :width])
        assert torch.equal(ours.top_token_ids[2, :1].cpu(), expected.top_token_ids[2, :1])
    assert sample(place(logits), placed(place, chosen), max_logprobs=-1).top_token_ids.shape == (3, 0)


def test_a_cpu_looks_how_many_logprobs_are_wanted():
    """A GPU would have to be waited for."""
    logits, chosen = random_logits(2, 10), parameters([{}] * 2, 3)
    chosen.num_logprobs[0] = -1
    assert sample(logits, chosen).top_token_ids.shape == (2, 3)
    assert token_logprobs(logits, int32(0, 0), chosen.num_logprobs).top_logprobs.shape == (2, 3)


@pytest.mark.parametrize(
    ("dtype_of_logits", "filters", "rules_of_rows"),
    [
        (torch.bfloat16, [GREEDY, {}], [{"allowed": [7, 149, 30]}, {}, {"output": [5] * 9, "frequency": 0.5}]),
        pytest.param(torch.bfloat16, FILTERS, [{}], marks=slow),
        pytest.param(torch.float16, FILTERS, [{}], marks=slow),
        pytest.param(
            torch.bfloat16, FILTERS, [{"allowed": [7, 149, 30]}, {}, {"output": [5] * 9, "frequency": 0.5}], marks=slow
        ),
    ],
)
def test_logits_of_16_bits_are_those_numbers_in_float32_on_a_gpu(gpu, place, dtype_of_logits, filters, rules_of_rows):
    """To the bit: tokens, outcomes and log-probabilities, of rows with rules and of those beside them."""
    logits = random_logits(len(filters) + 1, 160, 5, 5.0).to(dtype_of_logits)
    logits[-1, 159] = float("inf")
    cycled = [rules_of_rows[i % len(rules_of_rows)] for i in range(len(logits))]
    chosen_rules = rules(*cycled) if any(rules_of_rows) else None
    wide, narrow = (draw(place, given, [*filters, {}], chosen_rules, 4) for given in (logits.float(), logits))
    assert_same_columns(narrow, wide)
    assert narrow.outcomes.tolist() == [SampleOutcome.DRAWN] * len(filters) + [SampleOutcome.NOT_FINITE]
    token_ids, wanted = place(torch.arange(len(logits)).int()), place(torch.full((len(logits),), 4).int())
    taken = [token_logprobs(place(given), token_ids, wanted, max_logprobs=4) for given in (logits.float(), logits)]
    assert_same_columns(*taken)


def assert_same_columns(ours, expected):
    """Bit by bit; what was never written holds the same in both."""
    for field in dataclasses.fields(expected):
        mine, theirs = (getattr(columns, field.name).cpu() for columns in (ours, expected))
        assert torch.equal(mine.view(torch.int32), theirs.view(torch.int32)), field.name


def test_no_rows_give_no_tokens(place):
    samples = draw(place, torch.zeros(0, 8), [], num_logprobs=3)
    assert samples.token_ids.shape == (0,)
    assert samples.top_token_ids.shape == (0, 3)


@pytest.mark.parametrize(
    ("chosen", "problem"),
    [
        (rules({"forbidden": [8]}), "forbidden.token_ids must be 0 to 7"),
        (rules({"output": [-1], "presence": 1.0}), "output.token_ids must be 0 to 7"),
        (rules({"allowed": [1]}, {"allowed": [1]}), r"allowed.cu_lens must have shape \[2\]"),
        (rules({"biased": [1], "biases": []}), "biases must have shape"),
    ],
)
def test_lists_that_compiled_code_could_not_bear_are_refused(chosen, problem):
    with pytest.raises(KernelArgumentError, match=problem):
        sample(torch.zeros(1, 8), parameters([GREEDY]), chosen)


def test_masks_that_are_too_narrow_or_of_other_rows_are_refused():
    logits, one = torch.zeros(1, 40), parameters([GREEDY])
    with pytest.raises(KernelArgumentError, match="masks must have a bit for each of 40 tokens"):
        sample(logits, one, masks=masks(32, {1}))
    with pytest.raises(KernelArgumentError, match=r"masks.of_draws must have shape \[1\]"):
        sample(logits, one, masks=masks(40, {1}, {2}))


def test_logits_and_columns_of_another_kind_are_refused():
    """A CPU has float32 only."""
    logits, chosen, one = torch.zeros(1, 5, dtype=torch.bfloat16), parameters([{}]), int32(1)
    with pytest.raises(KernelArgumentError, match=r"sample: logits must be torch\.float32, not torch\.bfloat16"):
        sample(logits, chosen)
    with pytest.raises(KernelArgumentError, match=r"float32 or torch\.bfloat16 or torch\.float16, not torch\.float64"):
        token_logprobs(logits.to("meta", torch.float64), chosen.top_k, chosen.top_k)
    with pytest.raises(KernelArgumentError, match="temperature must have shape"):
        sample(torch.zeros(2, 8), parameters([{}] * 3))
    with pytest.raises(KernelArgumentError, match="token_ids must be 0 to 7"):
        token_logprobs(torch.zeros(1, 8), one * 8, one)


def test_what_a_gpu_cannot_know_or_do_is_refused(gpu, place):
    one, chosen = place(int32(1)), placed(place, parameters([{}]))
    with pytest.raises(KernelArgumentError, match="max_logprobs must be given on a GPU"):
        sample(place(torch.zeros(1, 5)), chosen)
    many = place(torch.ones(65_536, dtype=torch.int32))
    with pytest.raises(KernelArgumentError, match="logits must have at most 65535 rows on a GPU, not 65536"):
        token_logprobs(place(torch.zeros(65_536, 1)), many, many, max_logprobs=0)
    with pytest.raises(KernelArgumentError, match="max_logprobs must be at most 1024 on a GPU, not 2000"):
        token_logprobs(place(torch.zeros(1, 5000)), one, one, max_logprobs=2000)

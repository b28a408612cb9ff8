"""sampling on a GPU draws the tokens that the reference draws; another one only where two are as good as equal.

As good as equal are scores, and a score or a mass and the border of a filter, less than 1e-5 apart.
"""

import dataclasses

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_kernels import sampling
from paceline_kernels.errors import KernelArgumentError
from paceline_kernels.gpu import architecture
from paceline_kernels.sampling import LogitRules, SampleOutcome, SamplingParameters, TokenLists, reference
from paceline_kernels.sampling import triton as kernels
from paceline_kernels.sampling.triton.noise import (
    NOISE_AT_ZERO_BITS,
    NOISE_PER_BIT,
    bits_of_rest,
    gumbel,
    random_words,
)
from paceline_kernels.testing.bounds import BoundedMemory
from paceline_kernels.testing.tensors import placed, random_logits

CLOSE = 1e-5
LISTS = ("allowed", "forbidden", "biased", "prompt", "output")
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 3}
FILTERS = [
    OFF,
    OFF | {"temperature": 0.0},
    OFF | {"temperature": 0.7, "seed": -1},
    OFF | {"top_p": 0.9},
    OFF | {"top_p": 0.05, "temperature": 3.0},
    OFF | {"top_p": 1e-45},
    OFF | {"top_k": 5},
    OFF | {"min_p": 0.05},
    OFF | {"min_p": 0.001, "top_k": 40, "top_p": 0.7, "temperature": 1.3},
]


@pytest.fixture(scope="module", autouse=True)
def _small_launch():
    """So that few tokens are several chunks, and more than are searched at a time."""
    launches, here = kernels.LAUNCHES, architecture.current()
    table = launches[here]
    launches[here] = dataclasses.replace(table, survey_segments=4, chunk=1, capacity=64, rule_block=128)
    yield
    launches[here] = table


@pytest.fixture(scope="module", autouse=True)
def _fused_multiply_add(device):
    """The interpreter rounds a fused multiply-add twice, a GPU once."""
    with pytest.MonkeyPatch.context() as patch:
        if device.type == "cpu":
            from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

            def fma(_builder, x, y, z):
                return TensorHandle((x.data * y.data.astype(np.float64) + z.data).astype(np.float32), z.dtype.scalar)

            patch.setattr(InterpreterBuilder, "create_fma", fma)
        yield


def parameters(filters, num_logprobs=-1):
    """A row each; offsets count up."""
    return SamplingParameters(
        temperature=torch.tensor([row["temperature"] for row in filters]),
        top_k=torch.tensor([row["top_k"] for row in filters], dtype=torch.int32),
        top_p=torch.tensor([row["top_p"] for row in filters]),
        min_p=torch.tensor([row["min_p"] for row in filters]),
        seeds=torch.tensor([row["seed"] for row in filters], dtype=torch.int64),
        offsets=torch.arange(len(filters), dtype=torch.int32),
        num_logprobs=torch.full((len(filters),), num_logprobs, dtype=torch.int32),
    )


def rules(*rows):
    """The rules of rows, each with the lists and penalties that it names; biases are 1, 2 and so on."""

    def lists(name):
        tokens = [row.get(name, []) for row in rows]
        ends = torch.tensor([0, *map(len, tokens)]).cumsum(0).int()
        return TokenLists(ends, torch.tensor([token for row in tokens for token in row], dtype=torch.int32))

    def penalty(name, off):
        return torch.tensor([row.get(name, off) for row in rows])

    named = {name: lists(name) for name in LISTS}
    return LogitRules(
        **named,
        biases=torch.tensor([i + 1.0 for row in rows for i in range(len(row.get("biased", [])))]),
        presence_penalty=penalty("presence", 0.0),
        frequency_penalty=penalty("frequency", 0.0),
        repetition_penalty=penalty("repetition", 1.0),
    )


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


def assert_same_columns(ours, expected):
    """Bit by bit; what was never written holds the same in both."""
    for field in dataclasses.fields(expected):
        mine, theirs = (getattr(columns, field.name).cpu() for columns in (ours, expected))
        assert torch.equal(mine.view(torch.int32), theirs.view(torch.int32)), field.name


def assert_same_draws(place, logits, filters, chosen_rules=None):
    """Token by token what the reference draws, or what it might as well have drawn. Returns our samples."""
    chosen = parameters(filters)
    ours = kernels.sample(place(logits), placed(place, chosen), placed(place, chosen_rules), -1)
    expected = reference.sample(logits, chosen, chosen_rules)
    assert torch.equal(ours.outcomes.cpu(), expected.outcomes)
    for i, (token, other) in enumerate(zip(ours.token_ids.tolist(), expected.token_ids.tolist(), strict=True)):
        left = logits[i].numpy() if chosen_rules is None else reference.ruled(logits[i].numpy(), chosen_rules, i)
        assert token == other or could_be_drawn(left, filters[i], i, token), (i, filters[i], token, other)
    return ours


@triton.jit
def _noise_kernel(counters, words, noise, bits, seeds, offsets, COUNT: tl.constexpr):  # noqa: N803
    ours = random_words(tl.load(seeds), tl.load(offsets), tl.load(counters + tl.arange(0, COUNT)))
    ours = tl.reshape(ours, [4 * COUNT])
    places = tl.arange(0, 4 * COUNT)
    tl.store(words + places, ours.to(tl.int32, bitcast=True))
    tl.store(noise + places, gumbel(ours))
    tl.store(bits + places, bits_of_rest(ours))


@pytest.mark.parametrize(("seed", "offset"), [(0, 0), (-1, 2**31 - 1), (0x299F31D0_A4093822, 7)])
def test_noise_is_that_of_the_definition_and_below_its_bound(place, seed, offset):
    counters = torch.arange(2**14 - 64, 2**14 + 64, dtype=torch.int32)
    words, bits = (place(torch.zeros(512, dtype=torch.int32)) for _ in range(2))
    noise, seeds, offsets = place(torch.zeros(512)), torch.tensor([seed]), torch.tensor([offset], dtype=torch.int32)
    _noise_kernel[(1,)](place(counters), words, noise, bits, place(seeds), place(offsets), COUNT=128)
    columns = np.stack([counters.numpy(), np.full(128, offset), np.zeros(128), np.zeros(128)], axis=1)
    expected = reference.philox4x32(columns.astype(np.uint64), (seed % 2**64 % 2**32, (seed % 2**64) >> 32)).ravel()
    assert (words.cpu().numpy().view(np.uint32) == expected).all()
    u = ((expected >> 9) + 0.5) / 2**23
    ours = noise.cpu().numpy()
    bounds = NOISE_AT_ZERO_BITS.value - NOISE_PER_BIT.value * bits.cpu().numpy().astype(float)
    np.testing.assert_allclose(ours, -np.log(-np.log(u)), rtol=1e-6, atol=1e-6)
    assert (ours <= bounds + 1e-5).all()
    assert (bounds - ours)[ours > 4].max() < 0.08


def test_the_judge_of_close_calls_accepts_no_other_token():
    scores = random_logits(1, 50)[0].numpy() + reference.gumbel_noise(50, 3, 0)
    accepted = [token for token in range(50) if could_be_drawn(random_logits(1, 50)[0].numpy(), OFF, 0, token)]
    assert accepted == [scores.argmax()]
    close = -reference.gumbel_noise(50, 3, 0)
    close[2:] -= 1
    assert [token for token in range(50) if could_be_drawn(close, OFF, 0, token)] == [0, 1]


@pytest.mark.parametrize("vocab_size", [1, 63, 129, 600])
def test_every_filter_draws_what_the_reference_draws(place, vocab_size):
    """A row each, at vocabularies that no tile divides; 600 tokens are more than one program surveys."""
    assert_same_draws(place, random_logits(len(FILTERS), vocab_size, vocab_size), FILTERS)


@settings(max_examples=settings.default.max_examples // 33, deadline=None)  # on a GPU the first one compiles
@given(data=st.data())
def test_any_filters_together_draw_what_the_reference_draws(device, data):
    row = st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.2, 1.0, 3.0]),
            "top_k": st.sampled_from([0, 1, 2, 40, 97, 1000]),
            "top_p": st.sampled_from([0.3, 0.9, 0.999, 1.0]),
            "min_p": st.sampled_from([0.0, 0.02, 0.3, 1.0]),
            "seed": st.integers(-(2**63), 2**63 - 1),
        }
    )
    filters = data.draw(st.lists(row, min_size=4, max_size=4))
    logits = random_logits(4, data.draw(st.sampled_from([98, 300])), data.draw(st.integers(0, 1000)))
    assert_same_draws(BoundedMemory(device).place, logits, filters)


def test_flat_logits_are_searched_in_parts(place):
    filters = [
        OFF | {"top_k": 100},
        OFF | {"top_k": 200, "top_p": 0.5},
        OFF | {"top_k": 150, "top_p": 0.99},
    ]
    logits = random_logits(3, 300, 1, 0.3)
    logits[2] = 1.0
    assert_same_draws(place, logits, filters)


def test_greedy_takes_the_lowest_id_on_ties_and_what_would_overflow(place):
    logits = torch.zeros(3, 300)
    logits[0, [150, 299]] = 5.0
    logits[2] = torch.linspace(-3e35, 3e35, 300)
    filters = [OFF | {"temperature": temperature} for temperature in (0.0, 9e-6, 1e-4)]
    assert assert_same_draws(place, logits, filters).token_ids.tolist() == [150, 0, 299]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_is_marked_and_others_are_not(place, bad):
    logits = random_logits(3, 200)
    logits[0, 199] = logits[1, 0] = bad
    samples = assert_same_draws(place, logits, [OFF | {"temperature": 0.0}, OFF | {"top_p": 0.9}, OFF])
    assert samples.outcomes.tolist() == [SampleOutcome.NOT_FINITE, SampleOutcome.NOT_FINITE, SampleOutcome.DRAWN]


def test_rules_change_what_the_reference_changes(place):
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
    logits, chosen = random_logits(len(rows), 150), rules(*rows)
    samples = assert_same_draws(place, logits, [OFF | {"temperature": 0.0}] * len(rows), chosen)
    assert samples.outcomes.tolist() == [SampleOutcome.DRAWN] * 7 + [SampleOutcome.NOTHING_LEFT]
    assert_same_draws(place, logits[4:], [OFF | {"top_p": 0.9, "top_k": 5}] * 4, rules(*rows[4:]))


def test_a_token_beyond_the_vocabulary_changes_nothing(place):
    chosen = rules({"forbidden": [-1, 150, 2**31 - 1], "output": [150, 7], "presence": 0.5})
    ours = kernels.sample(
        place(torch.linspace(0, 1, 150)[None]),
        placed(place, parameters([OFF | {"temperature": 0.0}])),
        placed(place, chosen),
        -1,
    )
    assert ours.token_ids.tolist() == [149]


@pytest.mark.parametrize("num_logprobs", [0, 5, 60])
def test_logprobs_are_of_the_distribution_before_temperature_filters_and_rules(place, num_logprobs):
    logits, chosen = random_logits(2, 37), parameters([FILTERS[2], FILTERS[5]], num_logprobs)
    forbidden = rules({"forbidden": [int(logits[0].argmax())]}, {})
    ours = kernels.sample(place(logits), placed(place, chosen), placed(place, forbidden), num_logprobs)
    expected = reference.sample(logits, chosen, forbidden)
    assert torch.equal(ours.token_ids.cpu(), expected.token_ids)
    assert torch.equal(ours.top_token_ids.cpu(), expected.top_token_ids)
    torch.testing.assert_close(ours.logprobs.cpu(), expected.logprobs, rtol=0, atol=2e-6)
    torch.testing.assert_close(ours.top_logprobs.cpu(), expected.top_logprobs, rtol=0, atol=2e-6)


def test_logprobs_of_given_tokens_over_several_segments(place):
    logits = random_logits(4, 300, 2, 0.5)
    logits[1] = -2.0
    given, wanted = torch.tensor([0, 299, 150, 5], dtype=torch.int32), torch.tensor([7, 7, 3, -1], dtype=torch.int32)
    taken = kernels.token_logprobs(place(logits), place(given), place(wanted), 7)
    expected = torch.log_softmax(logits.double(), dim=-1)
    best = torch.sort(expected, dim=-1, descending=True, stable=True)
    for row, count in enumerate((7, 7, 3)):
        assert taken.top_token_ids[row, :count].tolist() == best.indices[row, :count].tolist()
        assert taken.logprobs[row].item() == pytest.approx(expected[row, given[row]].item(), abs=2e-6)
        assert taken.top_logprobs[row, :count].tolist() == pytest.approx(best.values[row, :count].tolist(), abs=2e-6)
    assert taken.logprobs[3].isnan(), "left as it was"


def test_logprobs_of_what_is_not_finite_or_no_token_are_no_number(place):
    logits = random_logits(4, 200)
    logits[0, 3], logits[1, 150], logits[2, 0] = float("nan"), float("inf"), float("-inf")
    given, wanted = torch.tensor([0, 0, 0, 200], dtype=torch.int32), torch.full((4,), 2, dtype=torch.int32)
    taken = kernels.token_logprobs(place(logits), place(given), place(wanted), 2)
    assert taken.logprobs.isnan().tolist() == [True, True, False, True]
    assert taken.logprobs[2] == float("-inf")
    assert taken.top_logprobs.isnan().all(dim=1).tolist() == [True, True, False, False]


def test_a_row_draws_the_same_alone_and_in_a_batch(place):
    logits, chosen = random_logits(3, 129), parameters([FILTERS[7]] * 3, 2)
    together = kernels.sample(place(logits), placed(place, chosen), None, 2)
    alone = SamplingParameters(*(getattr(chosen, field.name)[2:] for field in dataclasses.fields(chosen)))
    single = kernels.sample(place(logits[2:]), placed(place, alone), None, 2)
    for field in dataclasses.fields(single):
        assert torch.equal(getattr(single, field.name)[0], getattr(together, field.name)[2]), field.name


@pytest.mark.parametrize(
    ("dtype", "rules_of_rows"),
    [
        (torch.bfloat16, [{}]),
        (torch.float16, [{}]),
        (torch.bfloat16, [{"allowed": [7, 149, 30]}, {}, {"output": [5] * 9, "frequency": 0.5}]),
    ],
    ids=["bfloat16", "float16", "rules"],
)
def test_logits_of_16_bits_are_those_numbers_in_float32(place, dtype, rules_of_rows):
    """To the bit: tokens, outcomes and log-probabilities, of rows with rules and of those beside them."""
    logits = random_logits(len(FILTERS) + 1, 300, 5, 5.0).to(dtype)
    logits[-1, 299] = float("inf")
    chosen = placed(place, parameters([*FILTERS, OFF], 4))
    cycled = [rules_of_rows[i % len(rules_of_rows)] for i in range(len(logits))]
    chosen_rules = placed(place, rules(*cycled)) if any(rules_of_rows) else None
    wide, narrow = (kernels.sample(place(given), chosen, chosen_rules, 4) for given in (logits.float(), logits))
    assert_same_columns(narrow, wide)
    assert narrow.outcomes.tolist() == [SampleOutcome.DRAWN] * len(FILTERS) + [SampleOutcome.NOT_FINITE]
    token_ids = place(torch.arange(len(logits), dtype=torch.int32))
    wide, narrow = (
        kernels.token_logprobs(place(given), token_ids, chosen.num_logprobs, 4) for given in (logits.float(), logits)
    )
    assert_same_columns(narrow, wide)


def test_logits_of_other_types_are_refused():
    """A CPU has float32 only."""
    logits, chosen = torch.zeros(1, 5, dtype=torch.bfloat16), parameters([OFF])
    with pytest.raises(KernelArgumentError, match=r"sample: logits must be torch\.float32, not torch\.bfloat16"):
        sampling.sample(logits, chosen)
    with pytest.raises(KernelArgumentError, match=r"float32 or torch\.bfloat16 or torch\.float16, not torch\.float64"):
        sampling.token_logprobs(logits.to("meta", torch.float64), chosen.top_k, chosen.top_k)


def test_what_a_gpu_cannot_know_or_do_is_refused(place):
    with pytest.raises(KernelArgumentError, match="max_logprobs must be given on a GPU"):
        sampling._known("sample", None)
    one = place(torch.ones(1, dtype=torch.int32))
    with pytest.raises(KernelArgumentError, match="logits must have at most 65535 rows on a GPU, not 65536"):
        kernels.token_logprobs(torch.zeros(65_536, 1), one, one, 0)
    with pytest.raises(KernelArgumentError, match="max_logprobs must be at most 1024 on a GPU, not 2000"):
        kernels.token_logprobs(place(torch.zeros(1, 5000)), one, one, 2000)


def test_no_rows_give_no_tokens(place):
    samples = kernels.sample(place(torch.zeros(0, 8)), placed(place, parameters([])), None, 3)
    assert samples.top_token_ids.shape == (0, 3)

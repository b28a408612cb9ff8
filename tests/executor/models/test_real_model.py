"""The default model, SmolLM2-135M-Instruct from its GGUF file, against transformers on the same dequantised weights.

Four prompts of many kinds against what transformers answered once, `real_model/greedy_tokens.json`, and two of them in
chunks, beside each other and with packed weights. All else is for longer tiers: transformers itself, fifty prompts,
forty-eight greedy tokens each; then the same bits however the tokens are grouped into chunks, batches and shared
blocks: for ten of the prompts, in `make soak` for all of them, ten at a time.

All that in float32. With packed weights, the same bits again, for three prompts (in `make soak` for all), and
log-probabilities that lie as near those in float32 as rounding lets them.
"""

import json
from dataclasses import dataclass

import pytest
import torch

from executor_rig.cpu import cpu_runner
from executor_rig.driving import Draw, Driver
from model_inputs import Row, inputs_of
from paceline_executor.numerics import KvDtype, MatrixKind, Numerics
from paceline_executor.weights import load_checkpoint
from paceline_executor.weights.fetch.fetching import sha256_of
from real_model import GREEDY_TOKENS, NUM_TOKENS, TEN, greedy_tokens_text

NUM_LONG_TOKENS = 48
BUDGET = 512
# The oracle's own rounding decides which of two tokens is larger when their logits are closer than this.
SMALLEST_MARGIN = 1e-3
NUM_PACKED_TOKENS = 24
TOP_TWO = Draw(num_logprobs=2)


@pytest.fixture(scope="module")
def runner(default_model):
    """One runner for all tests: blocks are granted anew, in another order, by every driver.

    One thread: its time depends less on what else the machine does. That threads change no bit is tested elsewhere.
    """
    return cpu_runner(load_checkpoint(default_model), num_blocks=600, block_size=16)


def greedy_run(runner, prompts, num_tokens):
    """Tokens and log-probabilities of these prompts, in one batch and chunks of the budget."""
    driver = Driver(runner)
    rows = [driver.add(prompt, TOP_TWO, max_chunk=BUDGET) for prompt in prompts]
    driver.run(rows, num_tokens)
    return [(row.output, row.logprobs) for row in rows]


@pytest.fixture(scope="module")
def answers_of_four(runner, fifty_prompts):
    return greedy_run(runner, fifty_prompts[TEN][:4], NUM_TOKENS)


@pytest.fixture(scope="module")
def plain(runner, fifty_prompts):
    """The reference run: all prompts."""
    return greedy_run(runner, fifty_prompts, NUM_LONG_TOKENS)


@dataclass(frozen=True)
class Varied:
    """Prompts, and what each was answered in the reference run."""

    prompts: list
    expected: list
    num_tokens: int

    def starts(self, num_tokens):
        """The first tokens of each answer."""
        return [(output[:num_tokens], logprobs[:num_tokens]) for output, logprobs in self.expected]


LONG = [
    pytest.param(TEN, id="ten", marks=pytest.mark.slow),
    *(pytest.param(slice(i, 50, 5), id=f"ten of all, from {i}", marks=pytest.mark.soak) for i in range(5)),
]


@pytest.fixture(params=[pytest.param(None, id="two"), *LONG])
def varied(request, fifty_prompts):
    """Two prompts; ten that are far apart; in the longest tier all of them."""
    if request.param is None:
        return Varied(fifty_prompts[TEN][:2], request.getfixturevalue("answers_of_four")[:2], NUM_TOKENS)
    return Varied(fifty_prompts[request.param], request.getfixturevalue("plain")[request.param], NUM_LONG_TOKENS)


@pytest.fixture(params=LONG)
def ten(request):
    return request.param


@pytest.fixture(scope="module")
def oracle(default_model):
    from real_model.oracle import Oracle  # transformers takes seconds to import

    return Oracle(default_model)


def test_ten_prompts_are_answered_with_the_tokens_of_transformers(default_model, runner, fifty_prompts):
    recorded = json.loads(GREEDY_TOKENS.read_text(encoding="utf-8"))
    assert recorded["sha256"] == sha256_of(default_model)
    assert [output for output, _ in greedy_run(runner, fifty_prompts[TEN], NUM_TOKENS)] == recorded["tokens"]


@pytest.mark.slow
def test_the_recorded_tokens_are_those_that_transformers_gives_now(default_model, oracle, fifty_prompts):
    outputs = [oracle.greedy(prompt, NUM_TOKENS) for prompt in fifty_prompts[TEN]]
    assert GREEDY_TOKENS.read_text(encoding="utf-8") == greedy_tokens_text(default_model, outputs)


@pytest.mark.slow
def test_greedy_tokens_equal_those_of_transformers(oracle, fifty_prompts, plain):
    """Token for token; only where the oracle itself is undecided may another token stand."""
    parted = [oracle.undecided(prompt, output) for prompt, (output, _) in zip(fifty_prompts, plain, strict=True)]
    assert all(margin < SMALLEST_MARGIN for margins in parted for margin in margins.values()), parted
    # Undecided moments are rare: were there many, something else would be wrong.
    assert sum(map(len, parted)) <= 5


def test_chunks_do_not_change_a_bit(runner, varied):
    """In chunks of 1, 7, 16 and the budget, all in one batch, in other blocks: as in the reference run."""
    driver = Driver(runner, seed=1)
    rows = {
        chunk: [driver.add(prompt, TOP_TWO, max_chunk=chunk) for prompt in varied.prompts]
        for chunk in (1, 7, 16, BUDGET)
    }
    driver.run([row for chunk_rows in rows.values() for row in chunk_rows], varied.num_tokens)
    for chunk, chunk_rows in rows.items():
        assert [(row.output, row.logprobs) for row in chunk_rows] == varied.expected, chunk


@pytest.mark.parametrize(
    "num_mates", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow)]
)
def test_batch_mates_do_not_change_a_bit(request, runner, varied, num_mates):
    """Fewer tokens below the longest tier: steps with few rows cost the most per token."""
    num_tokens = varied.num_tokens if request.config.getoption("--tier") == "soak" else varied.num_tokens // 2
    cases = list(zip(varied.prompts, varied.starts(num_tokens), strict=True))
    for first in range(0, len(cases), num_mates + 1):
        together = cases[first : first + num_mates + 1]
        driver = Driver(runner, seed=first + num_mates)
        rows = [driver.add(prompt, TOP_TWO) for prompt, _ in together]
        driver.run(rows, num_tokens)
        assert [(row.output, row.logprobs) for row in rows] == [expected for _, expected in together], first


def test_prefix_hits_do_not_change_a_bit(runner, fifty_prompts, plain, ten):
    """A prompt whose blocks another request computed first, in other chunks, for itself."""
    driver = Driver(runner, seed=9)
    firsts = [driver.add([*prompt, 7, 8, 9], max_chunk=11) for prompt in fifty_prompts[ten]]
    driver.run(firsts, 2)
    rows = [driver.add(prompt, TOP_TWO, shares=first) for prompt, first in zip(fifty_prompts[ten], firsts, strict=True)]
    assert sum(row.num_computed for row in rows) >= 5 * 16  # at least five blocks were shared
    driver.run(rows, NUM_LONG_TOKENS)
    assert [(row.output, row.logprobs) for row in rows] == plain[ten]


def test_a_seeded_request_draws_the_same_alone_and_in_a_batch(runner, fifty_prompts, ten):
    """Temperature, top_p and a seed; ten together in chunks of 16, then each alone."""
    draws = [Draw(temperature=0.8, top_p=0.95, seed=1000 + i) for i in range(10)]
    driver = Driver(runner, seed=3)
    together = [driver.add(prompt, draw, max_chunk=16) for prompt, draw in zip(fifty_prompts[ten], draws, strict=True)]
    driver.run(together, NUM_TOKENS)
    for row, prompt, draw in zip(together, fifty_prompts[ten], draws, strict=True):
        driver = Driver(runner, seed=4)
        alone = driver.add(prompt, draw)
        driver.run([alone], NUM_TOKENS)
        assert alone.output == row.output


@pytest.fixture(
    scope="module",
    params=[pytest.param(KvDtype.FLOAT16, marks=pytest.mark.slow), KvDtype.INT8],
    ids=lambda kv: kv.value,
)
def packed_runner(default_model, request):
    """The same model with its weights packed as the file has them, and keys and values in less than float32."""
    numerics = Numerics(MatrixKind.PACKED, request.param)
    return cpu_runner(load_checkpoint(default_model), num_blocks=600, block_size=16, numerics=numerics)


# Of 20, 22 and 88 tokens; in the longest tier all prompts.
LONG_PACKED = [
    pytest.param(slice(3, 50, 17), id="three", marks=pytest.mark.slow),
    *(pytest.param(slice(i, 50, 5), id=f"ten of all, from {i}", marks=pytest.mark.soak) for i in range(5)),
]


@pytest.fixture(params=LONG_PACKED)
def three(request):
    return request.param


@pytest.fixture(params=[pytest.param(None, id="two"), *LONG_PACKED])
def conversations(request, fifty_prompts):
    """Prompts with the answers of the reference run."""
    if request.param is None:
        prompts, answers = fifty_prompts[TEN][:2], request.getfixturevalue("answers_of_four")[:2]
    else:
        prompts, answers = fifty_prompts[request.param], request.getfixturevalue("plain")[request.param]
    return [prompt + output for prompt, (output, _) in zip(prompts, answers, strict=True)]


def test_packed_weights_give_the_same_bits_however_tokens_are_grouped(packed_runner, fifty_prompts, three):
    driver = Driver(packed_runner)
    together = [driver.add(prompt, TOP_TWO, max_chunk=BUDGET) for prompt in fifty_prompts[three]]
    driver.run(together, NUM_PACKED_TOKENS)
    expected = [(row.output, row.logprobs) for row in together]

    driver = Driver(packed_runner, seed=1)
    chunked = {
        chunk: [driver.add(prompt, TOP_TWO, max_chunk=chunk) for prompt in fifty_prompts[three]] for chunk in (1, 7, 16)
    }
    driver.run([row for rows in chunked.values() for row in rows], NUM_PACKED_TOKENS)
    for chunk, rows in chunked.items():
        assert [(row.output, row.logprobs) for row in rows] == expected, chunk

    driver = Driver(packed_runner, seed=2)
    for prompt, bits in zip(fifty_prompts[three], expected, strict=True):
        first = driver.add([*prompt, 7, 8, 9], max_chunk=11)
        driver.run([first], 2)
        alone = driver.add(prompt, TOP_TWO, shares=first)
        driver.run([alone], NUM_PACKED_TOKENS)
        assert (alone.output, alone.logprobs) == bits


def log_distributions(runner, token_ids):
    """What the model expects after each of these tokens: the log-probabilities of all tokens, [tokens, vocab]."""
    inputs = inputs_of(Row(token_ids, range(-(-len(token_ids) // 16))), block_size=16)
    return runner._device.run(lambda: runner._model.hidden(inputs, runner._kv_cache).log_softmax(-1))


def test_packed_weights_expect_what_float32_expects(packed_runner, runner, conversations):
    """After every token of a few conversations, given the same tokens before.

    Measured: the tokens' log-probabilities differ by 0.03 to 0.08 on average, the distributions by 0.002 to 0.007 nats.
    With one group of one layer's gates in another's place it is 0.12 and 0.014, without one layer's minima 1 and 0.5.
    """
    differences, divergences = [], []
    for token_ids in conversations:
        exact, packed = (log_distributions(each, token_ids) for each in (runner, packed_runner))
        following = torch.tensor(token_ids[1:])[:, None]
        differences.append(packed[:-1].gather(1, following) - exact[:-1].gather(1, following))
        divergences.append((exact.exp() * (exact - packed)).sum(dim=1))
    assert torch.cat(differences).abs().mean() < 0.1
    assert torch.cat(divergences).mean() < 0.01

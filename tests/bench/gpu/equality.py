"""Whether a device's tokens are the CPU's: greedy, drawn with seeds, and over many draws.

Knows what may differ: a token, only where rounding to the device's type decides between the two.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import torch

from gpu.cpu_model import Agreement, CpuModel, RoundedCheckpoint, agreement, errors_of, joined
from gpu.errors import CheckFailedError
from gpu.feed import Feed, Step, Stream
from gpu.rigs import Place, make_rig, uploaded
from paceline.plan.values import LogprobColumns, SamplingParams
from paceline_executor.limits import RowLimits
from paceline_executor.testing.models import FAMILY_CONFIGS, TINY_CONFIG
from paceline_executor.testing.plans import GREEDY
from paceline_executor.weights.checkpoint import ModelConfig

_BLOCK_SIZE = 16
_NUM_ROWS = 8
_MAX_TOKENS = 128  # of a step
# In spacings of the device's type at the size of the logits: the root mean square of what log-probabilities may be off,
# and how far below the CPU's best logit a token's may be. Where every operation of the CPU is rounded to bfloat16, they
# are 0.3 to 0.4 off and 1.4 at most; in Gemma 3, whose embeddings are multiplied, 1.5 and 13.
_ALLOWED = dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma2"), (1.0, 2.0)) | {"gemma3": (3.0, 15.0)}
_MAX_DRAFTS = 7
_NUM_TOP = 20
_NUM_COMPARED = 8  # log-probabilities behind each token
_LEAST_P = 1e-4


def limits_of(config: ModelConfig, num_rows: int, max_len: int, max_tokens: int = _MAX_TOKENS) -> RowLimits:
    """Rows that all may be as long as that at once."""
    num_blocks = num_rows * -(-max_len // _BLOCK_SIZE)
    return RowLimits(num_rows, max_len, max_tokens, num_blocks, _BLOCK_SIZE, config.vocab_size)


def prompts_of(config: ModelConfig, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Random token ids."""
    random = Random(seed)  # noqa: S311  repeatable, not secret
    return [[random.randrange(3, config.vocab_size) for _ in range(length)] for length in lengths]


def family_agrees(place: Place, family: str, num_tokens: int) -> str:
    """A family's greedy tokens. Raises CheckFailedError."""
    return _agree(place, FAMILY_CONFIGS[family], [GREEDY] * 6, num_tokens)


def draws_agree(place: Place, num_tokens: int) -> str:
    """Draws with seeds, at several temperatures. Raises CheckFailedError."""
    samplings = [
        SamplingParams(temperature=temperature, seed=2**40 + seed)
        for seed, temperature in enumerate((0.3, 0.7, 0.7, 1.0, 1.0, 1.5))
    ]
    return _agree(place, TINY_CONFIG, samplings, num_tokens)


def drafts_agree(place: Place, num_tokens: int) -> str:
    """The same with drafts of the device's own lookups, as many as there may be or fewer. Raises CheckFailedError."""
    samplings = [GREEDY] * 3 + [SamplingParams(temperature=0.7, seed=2**40 + seed) for seed in range(3)]
    return _agree(place, TINY_CONFIG, samplings, num_tokens, max_drafts=_MAX_DRAFTS)


def _agree(
    place: Place, config: ModelConfig, samplings: Sequence[SamplingParams], num_tokens: int, *, max_drafts: int = 0
) -> str:
    numerics = next(iter(place.numerics.values()))
    checkpoint = RoundedCheckpoint(config, numerics.dtype)
    lengths = (1, 5, 17, 40, 64, 33)
    limits = replace(limits_of(config, _NUM_ROWS, max(lengths) + num_tokens), max_num_draft_tokens=max_drafts)
    feed = Feed(make_rig(place, uploaded(place, checkpoint, limits.max_model_len), config, limits).engine, limits)
    prompts = prompts_of(config, lengths)
    if max_drafts:
        prompts = [prompt[: max(1, len(prompt) // 4)] * 4 for prompt in prompts]  # so that something is found
    streams = [
        feed.add(prompt, num_tokens, one, num_drafts=max(0, max_drafts - index), num_logprobs=_NUM_COMPARED)
        for index, (prompt, one) in enumerate(zip(prompts, samplings, strict=True))
    ]
    steps: list[Step] = []
    feed.run(steps.append)
    num_verified = sum(step.num_verified for step in steps)
    if max_drafts and not num_verified:
        raise CheckFailedError("no draft was found, and none verified")
    model = CpuModel(checkpoint, limits.max_model_len)
    found = joined([agreement(model, one.prompt, one.output, one.sampling, numerics.dtype) for one in streams])
    errors = [errors_of(model, one.prompt, one.output, one.logprobs, numerics.dtype) for one in streams]
    size = math.sqrt(np.mean(np.concatenate(errors) ** 2))
    sentence = _sentence(found, numerics.dtype, _ALLOWED[config.architecture], size)
    return f"{sentence}; {num_verified} drafts were verified" if max_drafts else sentence


def _sentence(found: Agreement, dtype: torch.dtype, allowed: tuple[float, float], size: float) -> str:
    """size: root of the mean square of what log-probabilities are off."""
    name, (allowed_size, allowed_worst) = str(dtype).removeprefix("torch."), allowed
    worst = f"the others at most {found.worst:.2f} of {allowed_worst:g} spacings of {name} below the best"
    sizes = f"log-probabilities are {size:.2f} of {allowed_size:g} off"
    sentence = f"{found.num_best} of {found.num_tokens} tokens are the CPU's choice, {worst}; {sizes}"
    if found.worst > allowed_worst or size > allowed_size:
        raise CheckFailedError(sentence)
    return sentence


def fits_distribution(place: Place, num_rows: int, num_draws: int) -> str:
    """Tokens drawn from one distribution, against its probabilities by the device's own logits.

    Pearson's chi-square over the likeliest tokens and the rest. Raises CheckFailedError.
    """
    config = replace(TINY_CONFIG, vocab_size=512)
    numerics = next(iter(place.numerics.values()))
    checkpoint = RoundedCheckpoint(config, numerics.dtype)
    limits = limits_of(config, num_rows, 16)
    feed = Feed(make_rig(place, uploaded(place, checkpoint, 16), config, limits).engine, limits)
    prompt = prompts_of(config, [5])[0]
    draw = SamplingParams(temperature=1.0)
    first = feed.add(prompt, 1, draw, num_logprobs=_NUM_TOP)
    streams = [feed.add(prompt, 1, replace(draw, seed=seed)) for seed in range(1, num_draws)]
    feed.run()
    p = _p_value(first, Counter(stream.output[0] for stream in (first, *streams)))
    sentence = f"p = {p:.3g} over {num_draws:,} draws, at least {_LEAST_P:g} is allowed"
    if p < _LEAST_P:
        raise CheckFailedError(sentence)
    return sentence


def _p_value(told: Stream, drawn: Counter[int]) -> float:
    columns = told.logprobs[0].columns
    shares = {int(token): math.exp(logprob) for token, logprob in zip(*_top(columns), strict=True)}
    num_draws = drawn.total()
    observed = [drawn[token] for token in shares]
    expected = [share * num_draws for share in shares.values()]
    observed.append(num_draws - sum(observed))
    expected.append(num_draws - sum(expected))
    chi_square = sum((seen - due) ** 2 / due for seen, due in zip(observed, expected, strict=True))
    return _chi_square_tail(chi_square, len(expected) - 1)


def _top(columns: LogprobColumns) -> tuple[list[int], list[float]]:
    return columns.top_token_ids[0].tolist(), columns.top_logprobs[0].tolist()


def _chi_square_tail(value: float, freedom: int) -> float:
    """How likely a value as large is, by the cube root's normal distribution (Wilson and Hilferty, 1931)."""
    spread = 2 / (9 * freedom)
    normal = ((value / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return 0.5 * math.erfc(normal / math.sqrt(2))

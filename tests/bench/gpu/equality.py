"""Whether a device's tokens are the CPU's: greedy, drawn with seeds, and with drafts.

Knows what may differ: a token, only where rounding to the device's type decides between the two. Distances are in
spacings of that type at the size of a row's largest logit: two logits that are each rounded to the next number of the
type may be 1 off.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from executor_rig.plans import GREEDY
from gpu.errors import CheckFailedError
from gpu.feed import Feed, Step, Stream, limits_of, prompts_of
from gpu.predictor import Predictor
from gpu.rigs import Place, make_feed, uploaded
from paceline.plan.sampling import SamplingParams
from paceline_executor.limits import RowLimits
from paceline_executor.upload.conversion import TORCH_TYPES
from paceline_executor.weights.checkpoint import Checkpoint, Float32Array, ModelConfig
from paceline_kernels.sampling.reference import gumbel_noise
from random_models import RandomCheckpoint

_LENGTHS = (1, 5, 17, 40, 64, 33)  # of prompts
GREEDY_ALONE = [GREEDY] * len(_LENGTHS)
SEEDED = [
    SamplingParams(temperature=temperature, seed=2**40 + seed)
    for seed, temperature in enumerate((0.3, 0.7, 0.7, 1.0, 1.0, 1.5))
]
GREEDY_AND_SEEDED = [GREEDY] * 3 + [SamplingParams(temperature=0.7, seed=2**40 + seed) for seed in range(3)]
_NUM_ROWS = 8
# The root mean square of what log-probabilities may be off, and how far below the CPU's best logit a token's may be.
# Where every operation of the CPU is rounded to bfloat16, they are 0.3 to 0.4 off and 1.4 at most; in Gemma 3, whose
# embeddings are multiplied, 1.5 and 13.
_ALLOWED = dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma2"), (1.0, 2.0)) | {"gemma3": (3.0, 15.0)}
_MIXTURES = frozenset(("mixtral", "qwen2moe", "qwen3moe", "olmoe", "glm4moe"))
_ALLOWED |= dict.fromkeys(_MIXTURES, (2.0, 4.0))
# Of a mixture's tokens those that are most off: where two experts are nearly as good, rounding decides between them,
# and logits are off by as much as these differ.
_FLIPPED = 1 / 16
_NUM_COMPARED = 8  # log-probabilities behind each token

_Float64Array = npt.NDArray[np.float64]


class RoundedCheckpoint(RandomCheckpoint):
    """Random weights that a device's type can hold, so that both sides compute with the same ones."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__(config)
        self._dtype = dtype

    def tensor(self, name: str) -> Float32Array:
        rounded: Float32Array = torch.from_numpy(super().tensor(name)).to(self._dtype).float().numpy()
        return rounded


def agrees(
    place: Place,
    config: ModelConfig,
    samplings: Sequence[SamplingParams],
    num_tokens: int,
    *,
    max_drafts: int = 0,
    feed_of: Callable[[Checkpoint, RowLimits], Feed] | None = None,
) -> str:
    """Compare outputs of so many tokens. max_drafts: of the device's own lookups, for each row as many or fewer.
    feed_of: None is that of the device alone.

    Raises CheckFailedError.
    """
    dtype = TORCH_TYPES[next(iter(place.numerics.values())).dtype]
    checkpoint = RoundedCheckpoint(config, dtype)
    limits = replace(limits_of(config, _NUM_ROWS, max(_LENGTHS) + num_tokens), max_num_draft_tokens=max_drafts)
    if feed_of is None:
        feed = make_feed(place, uploaded(place, checkpoint, limits.max_model_len), config, limits)
    else:
        feed = feed_of(checkpoint, limits)
    prompts = prompts_of(config, _LENGTHS)
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
    cpu = Predictor(checkpoint, limits.max_model_len)
    found = [distances(cpu, stream, dtype) for stream in streams]
    below, errors = (np.concatenate(parts) for parts in zip(*found, strict=True))
    if config.architecture in _MIXTURES:
        kept = np.square(errors).mean(axis=1).argsort()[: round(len(below) * (1 - _FLIPPED))]
        below, errors = below[kept], errors[kept]
    sentence = _judge(below, errors, dtype, _ALLOWED[config.architecture])
    return f"{sentence}; {num_verified} drafts were verified" if max_drafts else sentence


def distances(cpu: Predictor, stream: Stream, dtype: torch.dtype) -> tuple[_Float64Array, _Float64Array]:
    """How far each token of the output is below the CPU's best one, and how far off [tokens, few] log-probabilities
    are.
    """
    logits = cpu.logits([*stream.prompt, *stream.output], len(stream.prompt)).numpy().copy()
    spacings = torch.finfo(dtype).eps * 2.0 ** np.floor(np.log2(np.abs(logits).max(axis=1)))
    scores, temperature = logits, np.float32(stream.sampling.temperature)
    if temperature > 0:
        noise = [gumbel_noise(logits.shape[1], stream.sampling.seed, offset) for offset in range(len(logits))]
        scores = (logits / temperature + np.stack(noise)) * temperature
    below = (scores.max(axis=1) - scores[np.arange(len(scores)), stream.output]) / spacings
    tokens, told = (
        np.concatenate([getattr(one.columns, name) for one in stream.logprobs])
        for name in ("top_token_ids", "top_logprobs")
    )
    expected = torch.from_numpy(logits).log_softmax(1).numpy()
    errors = (told - np.take_along_axis(expected, tokens, 1)) / spacings[:, None]
    return below.astype(np.float64), errors.astype(np.float64)


def _judge(below: _Float64Array, errors: _Float64Array, dtype: torch.dtype, allowed: tuple[float, float]) -> str:
    size, worst = math.sqrt(np.mean(errors**2)), float(below.max())
    allowed_size, allowed_worst = allowed
    name = str(dtype).removeprefix("torch.")
    others = f"the others at most {worst:.2f} of {allowed_worst:g} spacings of {name} below the best"
    sizes = f"log-probabilities are {size:.2f} of {allowed_size:g} off"
    sentence = f"{np.sum(below == 0)} of {len(below)} tokens are the CPU's choice, {others}; {sizes}"
    if not (worst <= allowed_worst and size <= allowed_size):  # NaN is no distance that is allowed
        raise CheckFailedError(sentence)
    return sentence

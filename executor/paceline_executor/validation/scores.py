"""How far one model's predictions are from another's, place by place, and what that says of both.

Knows the definitions of the figures, and how both models are asked. Refuses to know files, texts and sentences.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline_executor.runner.device.runner import DeviceRunner
from paceline_executor.runner.interface import NO_CELLS, NOTHING_DESCRIBED, Int32Array, StepBatch
from paceline_executor.runner.measuring import prompt
from paceline_executor.validation.texts import NUM_GIVEN, Window

_ANSWER_TOKENS = 64
_LARGEST_EXPONENT = 700.0
_NUM_TOP = 256  # tokens of the base's distribution that are told apart; the others count as one

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Predictions:
    """Of the base, at all places of all windows that are predicted. Natural logarithms of probabilities."""

    target: Float32Array  # [num_places] of the token that stands there
    top_ids: Int32Array  # [num_places, num_top] best first
    top: Float32Array  # [num_places, num_top]
    rest: Float32Array  # [num_places] of all others together


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of the candidate with the base, at the same places."""

    target: Float32Array  # [num_places] log-probability
    divergence: Float32Array  # [num_places] nats, from the base; tokens beyond its best count as one
    is_same: npt.NDArray[np.bool_]  # [num_places] the base's best token is the candidate's


@dataclass(frozen=True, slots=True)
class Figures:
    """increase: of the perplexity, relative to the base's; 0.01 is 1 % worse. lower, upper: the ends of its 95 %
    interval, as far as the choice of the text goes. None: there is a single window.
    """

    num_windows: int
    num_predicted: int
    base_perplexity: float
    perplexity: float
    increase: float
    lower: float | None
    upper: float | None
    mean_divergence: float
    p99_divergence: float
    same_best: float  # share of the places


def predict(runner: DeviceRunner, windows: Sequence[Window], on_progress: Progress) -> Predictions:
    def take(logprobs: torch.Tensor, targets: torch.Tensor, _: slice) -> tuple[torch.Tensor, ...]:
        top, ids = logprobs.topk(min(_NUM_TOP, logprobs.shape[1]))
        return logprobs.gather(1, targets)[:, 0], ids.int(), top, _rest(logprobs, ids)

    return Predictions(*_read(runner, windows, take, on_progress))


def compare(runner: DeviceRunner, windows: Sequence[Window], base: Predictions, on_progress: Progress) -> Comparison:
    def take(logprobs: torch.Tensor, targets: torch.Tensor, places: slice) -> tuple[torch.Tensor, ...]:
        device = logprobs.device
        ids = torch.from_numpy(base.top_ids[places]).to(device, torch.int64)
        top, rest = (torch.from_numpy(column[places]).to(device) for column in (base.top, base.rest))
        found = logprobs.gather(1, ids)
        divergence = (top.exp() * (top - found)).sum(1)
        # Where the base has no other tokens both logarithms are infinite.
        divergence += torch.nan_to_num(rest.exp() * (rest - _rest(logprobs, ids)), posinf=math.inf)
        return logprobs.gather(1, targets)[:, 0], divergence, found[:, 0] >= logprobs.amax(1)

    return Comparison(*_read(runner, windows, take, on_progress))


def answers(runner: DeviceRunner, prompts: Sequence[Window], most: int, end_token_ids: Sequence[int]) -> list[Window]:
    """What is drawn greedily behind each of a few prompts, all at once, up to an end token.

    most: tokens of prompt and answer together.
    """
    tokens = [np.array(each, dtype=np.int32) for each in prompts]
    found: list[list[int]] = [[] for _ in tokens]
    block_size, lens = runner.kv_geometry.block_size, np.array([each.size for each in tokens], dtype=np.int32)
    for row, each in enumerate(tokens):
        batch = prompt(each, block_size, row=row, most=most, end_token_ids=end_token_ids)
        found[row] += runner.wait(runner.launch(batch)).token_ids.tolist()
    rows = np.arange(len(tokens), dtype=np.int32)
    for step in range(1, min(_ANSWER_TOKENS, most - int(lens.max(initial=0)))):
        batch = StepBatch(rows, np.ones_like(rows), lens + step, rows, NOTHING_DESCRIBED, NO_CELLS)
        output = runner.wait(runner.launch(batch))
        of_rows = np.split(output.token_ids, np.cumsum(output.num_accepted)[:-1])
        for answer, drawn in zip(found, of_rows, strict=True):
            answer += drawn.tolist()
    return [tuple(answer) for answer in found]


def first_difference(one: Window, other: Window) -> int | None:
    """The first token, counted from 0, that only one of them has. None: they are equal."""
    differing = (index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    return next(differing, None if len(one) == len(other) else min(len(one), len(other)))


def figures(base: Float32Array, candidate: Comparison, num_places: Sequence[int]) -> Figures:
    """base: its log-probabilities of the targets. num_places: of each window.

    The windows are the sample: places within one depend on each other. The interval is that of a ratio of two sums over
    windows (Cochran, Sampling Techniques, 6.4) with quantiles of Student's t.
    """
    excess = base.astype(np.float64) - candidate.target
    mean, error = _mean_of_places(excess, np.array(num_places))
    margin = None if error is None else error * _student(len(num_places) - 1)
    return Figures(
        num_windows=len(num_places),
        num_predicted=excess.size,
        base_perplexity=1 + _increase(-base.mean(dtype=np.float64)),
        perplexity=1 + _increase(-candidate.target.mean(dtype=np.float64)),
        increase=_increase(mean),
        lower=None if margin is None else _increase(mean - margin),
        upper=None if margin is None else _increase(mean + margin),
        mean_divergence=float(candidate.divergence.mean(dtype=np.float64)),
        p99_divergence=float(np.quantile(candidate.divergence, 0.99)),
        same_best=float(candidate.is_same.mean()),
    )


_Take = Callable[[torch.Tensor, torch.Tensor, slice], tuple[torch.Tensor, ...]]
"""Gets log-probabilities, [num_places, vocab], targets, [num_places, 1], and which of all places these are."""


def _read(runner: DeviceRunner, windows: Sequence[Window], take: _Take, on_progress: Progress) -> list[Any]:
    """Columns of all places."""
    parts: list[tuple[torch.Tensor, ...]] = []
    first = 0
    for index, window in enumerate(windows):
        on_progress(index / len(windows))
        parts += _read_window(runner, window, first, take)
        first += len(window) - NUM_GIVEN
    return [torch.cat(columns).numpy() for columns in zip(*parts, strict=True)]


def _read_window(runner: DeviceRunner, window: Window, first: int, take: _Take) -> list[tuple[torch.Tensor, ...]]:
    """first: of all places that of the window's first target."""
    targets = torch.tensor(window[NUM_GIVEN:])[:, None]

    def take_piece(places: slice, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Logits predict the token behind theirs; those of given tokens, and of the last one, are of no use."""
        start, stop = (max(place + 1 - NUM_GIVEN, 0) for place in (places.start, places.stop))
        stop = min(stop, targets.shape[0])
        logprobs = logits[start + NUM_GIVEN - 1 - places.start :][: stop - start].float().log_softmax(-1)
        return take(logprobs, targets[start:stop].to(logits.device), slice(first + start, first + stop))

    pieces = runner.over_logits(np.array(window, dtype=np.int32), take_piece)
    return [tuple(column.cpu() for column in piece) for piece in pieces]


def _rest(logprobs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return logprobs.scatter(1, ids, -math.inf).logsumexp(1)


def _mean_of_places(values: Float64Array, num_places: npt.NDArray[np.int64]) -> tuple[float, float | None]:
    """With its standard error, which a single window does not tell."""
    sums = np.add.reduceat(values, np.cumsum(num_places) - num_places)
    mean = float(sums.sum() / num_places.sum())
    num_windows = len(num_places)
    if num_windows == 1:
        return mean, None
    spread = float(((sums - mean * num_places) ** 2).sum()) * num_windows / (num_windows - 1)
    return mean, math.sqrt(spread) / float(num_places.sum())


def _increase(log_ratio: float) -> float:
    return math.expm1(min(log_ratio, _LARGEST_EXPONENT))


def _student(freedom: int) -> float:
    """The 97.5 % quantile (Abramowitz and Stegun, 26.7.5): 0.01 off with 7 degrees of freedom, less with more."""
    z, n = 1.959964, freedom
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)

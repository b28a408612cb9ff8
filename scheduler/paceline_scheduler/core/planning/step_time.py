"""How long a step will take: a linear model in tokens and attention work, fitted to what executors report.

    time = base + per_token * num_tokens + per_pair * num_pairs + per_draft * num_drafts

A pair is a new token together with one token it attends to. Drafts are tokens with a cost of their own. The model
starts from the executor's warm-up measurements and follows each result by normalised least mean squares (Widrow and
Hoff 1960; Haykin, Adaptive Filter Theory, ch. 6): one step along the input that removes a fixed share of the error,
which stays stable when the inputs hardly change.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from typing_extensions import TypeVar

from paceline.plan.values import Int32Array, StepPoint

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]
CountT = TypeVar("CountT", int, Int64Array)

_GAIN = 0.1
# The warm-up may have been disturbed: first steps count for more.
_FIRST_GAIN = 0.5
_NUM_FIRST_STEPS = 16
_DEFAULT_BASE_NS = 5e6
_DEFAULT_PER_TOKEN_NS = 1e6
_PER_PAIR_SHARE = 1e-4  # of the cost of a token, until measured
_TOKENS_SCALE = 64.0
_PAIRS_SCALE = 32768.0
_DRAFT_GAIN = 1 / 64
_DRAFT_WEIGHT = 0.25  # of the warm-up's figure, in squared drafts
_DRAFT_SPREAD = 0.05  # the same per other token: longer steps differ more by themselves


def num_chunk_pairs(start: CountT, num_tokens: CountT) -> CountT:
    """The tokens attend causally from position `start`."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


class _DraftCost:
    """A draft costs the slope of step times over drafts.

    Least squares in which recent steps count most, drawn towards what a token took in the warm-up.
    """

    def __init__(self, first_ns: float) -> None:
        self.ns = self._first_ns = first_ns
        self._mean_drafts = self._mean_ns = self._variance = self._covariance = 0.0

    def observe(self, num_drafts: int, num_others: int, ns: float) -> None:
        """`ns` is what the step took beyond what its other tokens were expected to."""
        drafts, beyond = num_drafts - self._mean_drafts, ns - self._mean_ns
        self._mean_drafts += _DRAFT_GAIN * drafts
        self._mean_ns += _DRAFT_GAIN * beyond
        self._variance = (1 - _DRAFT_GAIN) * (self._variance + _DRAFT_GAIN * drafts * drafts)
        self._covariance = (1 - _DRAFT_GAIN) * (self._covariance + _DRAFT_GAIN * drafts * beyond)
        weight = _DRAFT_WEIGHT + (_DRAFT_SPREAD * num_others) ** 2
        self.ns = max(0.0, (self._covariance + weight * self._first_ns) / (self._variance + weight))


class StepTimeModel:
    def __init__(self, points: Sequence[StepPoint]) -> None:
        base, per_token = _fit_line(points)
        per_pair = per_token * _PER_PAIR_SHARE
        # Weights belong to inputs scaled to about 1, so that one gain suits them all.
        self._weights = [base, per_token * _TOKENS_SCALE, per_pair * _PAIRS_SCALE]
        self._draft_cost = _DraftCost(per_token)
        self._num_steps = 0

    @property
    def weights(self) -> Sequence[float]:
        return self._weights

    def predict_ns(self, num_tokens: float, num_pairs: float, num_drafts: float = 0.0) -> float:
        base, per_token, per_pair = self._weights
        plain = base + per_token * ((num_tokens - num_drafts) / _TOKENS_SCALE) + per_pair * (num_pairs / _PAIRS_SCALE)
        return plain + self._draft_cost.ns * num_drafts

    def draft_costs(self, positions: Int32Array, num_places: int) -> npt.NDArray[np.float64]:
        """Returns nanoseconds, [len(positions), num_places]."""
        per_pair = self._weights[2]
        num_pairs = positions[:, np.newaxis] + np.arange(2, num_places + 2)
        costs: npt.NDArray[np.float64] = num_pairs * (per_pair / _PAIRS_SCALE)
        return costs + self._draft_cost.ns

    def observe(self, num_tokens: int, num_pairs: int, duration_ns: int, num_drafts: int | None = None) -> None:
        """One outlier moves a prediction by at most a tenth. `num_drafts` is None where there never are any."""
        base, per_token, per_pair = self._weights
        num_others = num_tokens - (num_drafts or 0)
        tokens, pairs = num_others / _TOKENS_SCALE, num_pairs / _PAIRS_SCALE
        plain = base + per_token * tokens + per_pair * pairs
        predicted = plain + self._draft_cost.ns * (num_drafts or 0)
        error = min(max(duration_ns - predicted, -predicted), predicted)
        gain = _FIRST_GAIN if error < 0 and self._num_steps < _NUM_FIRST_STEPS else _GAIN
        self._num_steps += 1
        step = gain * error / (1.0 + tokens * tokens + pairs * pairs)
        # A model that predicts nothing could never recover: its errors are bounded by its predictions.
        self._weights = [max(1e3, base + step), max(0.0, per_token + step * tokens), max(0.0, per_pair + step * pairs)]
        if num_drafts is not None:
            self._draft_cost.observe(num_drafts, num_others, predicted + error - plain)

    def max_decodes_within(self, limit_ns: float, positions: Int32Array) -> tuple[int, int]:
        """Returns how many of the first decodes, at least one, fit, and their pairs."""
        num_tokens = np.arange(1, len(positions) + 1)
        num_pairs = np.cumsum(positions, dtype=np.int64) + num_tokens
        base, per_token, per_pair = self._weights
        times = base + per_token * (num_tokens / _TOKENS_SCALE) + per_pair * (num_pairs / _PAIRS_SCALE)
        count = max(1, int(np.searchsorted(times, limit_ns, side="right")))
        return count, int(num_pairs[count - 1])

    def max_tokens_within(self, limit_ns: float, spent: tuple[int, int], start: int, wanted: int) -> int:
        """`spent` are the step's tokens and pairs so far."""
        base, per_token, per_pair = self._weights
        low, high = 0, wanted
        while low < high:
            middle = (low + high + 1) // 2
            pairs = spent[1] + num_chunk_pairs(start, middle)
            tokens_ns = per_token * ((spent[0] + middle) / _TOKENS_SCALE)
            if base + tokens_ns + per_pair * (pairs / _PAIRS_SCALE) <= limit_ns:
                low = middle
            else:
                high = middle - 1
        return low


class StepTimes:
    """The models of several executors, side by side: numbers of tokens and pairs are columns, or the same for all."""

    def __init__(self, models: Sequence[StepTimeModel]) -> None:
        self._weights = np.array([model.weights for model in models]).T

    def predict_ns(self, num_tokens: Int64Array | int, num_pairs: Int64Array | int) -> Float64Array:
        base, per_token, per_pair = self._weights
        times: Float64Array = base + per_token * (num_tokens / _TOKENS_SCALE) + per_pair * (num_pairs / _PAIRS_SCALE)
        return times


def _fit_line(points: Sequence[StepPoint]) -> tuple[float, float]:
    """Returns base and per-token time, both above 0."""
    if not points:
        return _DEFAULT_BASE_NS, _DEFAULT_PER_TOKEN_NS
    mean_x = sum(p.num_tokens for p in points) / len(points)
    mean_y = sum(p.duration_ns for p in points) / len(points)
    spread = sum((p.num_tokens - mean_x) ** 2 for p in points)
    if spread == 0:
        return mean_y / 2, mean_y / 2 / mean_x
    slope = sum((p.num_tokens - mean_x) * (p.duration_ns - mean_y) for p in points) / spread
    slope = max(slope, mean_y / mean_x / 100)
    return max(mean_y - slope * mean_x, mean_y / 100), slope

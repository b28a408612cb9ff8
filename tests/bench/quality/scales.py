"""What fewer scales would cost: float32's matrix products with inputs, or weights, rounded to int8 under fewer scales.

Nothing of the fast path runs here, so that what it does not do can be measured too. Keys and values stay float32.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
from torch.nn import functional

from paceline_executor.numerics import FLOAT32_NUMERICS
from paceline_executor.weights import Checkpoint
from paceline_kernels.linear import Splits, linear
from quality.measure import Quality, compare
from quality.predictor import Predictor, predictors

_MAX_INT8 = 127
_SMALLEST_SCALE = 1e-30


@dataclass(frozen=True, slots=True)
class Scales:
    """For how many neighbours along a row there is one scale; 0: for the whole row; None: nothing is rounded."""

    inputs: int | None = None
    weights: int | None = None  # a row of weights makes one output

    def labels(self) -> dict[str, str]:
        """As a report has it."""
        return {"inputs": _label(self.inputs), "weights": _label(self.weights)}


# The first is what the fast path does with inputs; weights keep the scales of their file there.
CANDIDATES = (
    Scales(inputs=32),
    Scales(inputs=64),
    Scales(inputs=0),
    Scales(inputs=32, weights=0),
    Scales(inputs=64, weights=0),
    Scales(inputs=0, weights=0),
)


def measure_scales(
    checkpoint: Checkpoint, candidates: Sequence[Scales], windows: Iterable[Sequence[int]], max_window: int
) -> list[Quality]:
    """The figures of float32 and then of each candidate, see `quality.measure.compare`."""
    (float32,) = predictors(checkpoint, [FLOAT32_NUMERICS], max_window)
    return compare(float32, [_Rounding(float32, scales) for scales in candidates], windows)


def rounded(x: torch.Tensor, size: int) -> torch.Tensor:
    """x [rows, width], as int8 with a scale for every `size` of a row has it, or for the whole row where that is 0."""
    rows, width = x.shape
    size = size or width
    groups = functional.pad(x, (0, -width % size)).view(rows, -1, size)
    scales = (groups.abs().amax(dim=-1, keepdim=True) / _MAX_INT8).clamp_min(_SMALLEST_SCALE)
    return (torch.round(groups / scales) * scales).view(rows, -1)[:, :width].contiguous()


@dataclass(frozen=True, slots=True)
class _Rounding:
    """A predictor whose products are rounded."""

    float32: Predictor
    scales: Scales

    def logprobs(self, token_ids: Sequence[int], start: int) -> torch.Tensor:
        with _rounded_products(self.scales):
            return self.float32.logprobs(token_ids, start)


@contextmanager
def _rounded_products(scales: Scales) -> Iterator[None]:
    """Inside, the model's products take rounded operands: it has no such choice itself, as nobody should make it."""

    def of_rounded(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, splits: Splits = Splits.EVEN
    ) -> torch.Tensor:
        x = x if scales.inputs is None else rounded(x, scales.inputs)
        weight = weight if scales.weights is None else rounded(weight, scales.weights)
        return linear(x, weight, bias, splits=splits)

    with mock.patch("paceline_executor.models.layers.linear", of_rounded):
        yield


def _label(size: int | None) -> str:
    if size is None:
        return "float32"
    return f"int8 by {size or 'row'}"

"""Draws from the logits of a large vocabulary, by the parameters that rows ask for. Knows no rules."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from gpu_kernels.case import Bound, Case, Place, Scale, Work, mismatch_of
from paceline_kernels.sampling import SamplingParameters, reference
from paceline_kernels.sampling.triton import sample

_NUM_CHECKED = 6  # rows that the reference draws for, too


@dataclass(frozen=True, slots=True)
class _Way:
    """How tokens are drawn."""

    name: str
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    num_logprobs: int = -1


_WAYS = (
    _Way("greedy", temperature=0.0),
    _Way("all tokens"),
    _Way("top_k 50", top_k=50),
    _Way("top_p 0.9", top_p=0.9),
    _Way("min_p 0.05", min_p=0.05),
    _Way("5 logprobs", num_logprobs=5),
)
# What interpreting is worth here; the tests of the operation draw in all ways from odd vocabularies.
_TWO_WAYS = (_WAYS[0], _Way("all filters", top_k=50, top_p=0.9, min_p=0.05, num_logprobs=2))


def cases(scale: Scale, place: Place) -> Iterator[Case]:
    """Every way for as many rows as a large batch has; one row, and a vocabulary of an odd size."""
    if scale is Scale.ODD:
        yield from (_case(place, 2, 129, way) for way in _TWO_WAYS)
        return
    if scale is Scale.FULL:
        yield from (_case(place, 1, 128_256, way) for way in _WAYS[:2])
    yield from (_case(place, 256, 128_256, way) for way in _WAYS)


def _case(place: Place, num_rows: int, vocab: int, way: _Way) -> Case:
    return Case(
        op="sample" if way.num_logprobs < 0 else "sample + best",
        shape={"rows": num_rows, "vocab": vocab, "way": way.name},
        bound=Bound.MEMORY,
        num_bytes=num_rows * vocab * 4,
        num_flops=0,
        build=_builder(place, num_rows, vocab, way),
        allowed_error=0.0,
    )


def _builder(place: Place, num_rows: int, vocab: int, way: _Way) -> Callable[[int], Work]:
    def build(seed: int) -> Work:
        # Three times as wide as normal, so that the likeliest token of a row has a chance of some hundredths.
        generator = torch.Generator(place.device).manual_seed(seed)
        logits = 3 * torch.randn(num_rows, vocab, generator=generator, device=place.device)
        parameters = _parameters(way, num_rows, seed)
        on_device = _moved(parameters, place.device)

        def ours() -> torch.Tensor:
            return sample(logits, on_device, None, way.num_logprobs).token_ids

        def error() -> float:
            checked = slice(0, _NUM_CHECKED)
            expected = reference.sample(logits[checked].cpu(), _first(parameters, checked))
            return mismatch_of((ours()[checked], expected.token_ids))

        return Work(ours, _theirs(way, logits), error)

    return build


def _parameters(way: _Way, num_rows: int, seed: int) -> SamplingParameters:
    def column(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((num_rows,), value, dtype=dtype)

    return SamplingParameters(
        temperature=column(way.temperature, torch.float32),
        top_k=column(way.top_k, torch.int32),
        top_p=column(way.top_p, torch.float32),
        min_p=column(way.min_p, torch.float32),
        seeds=torch.arange(num_rows) + 1000 * seed,
        offsets=torch.arange(num_rows, dtype=torch.int32),
        num_logprobs=column(way.num_logprobs, torch.int32),
    )


def _moved(parameters: SamplingParameters, device: torch.device) -> SamplingParameters:
    return _changed(parameters, lambda column: column.to(device))


def _first(parameters: SamplingParameters, rows: slice) -> SamplingParameters:
    return _changed(parameters, lambda column: column[rows])


def _changed(parameters: SamplingParameters, change: Callable[[torch.Tensor], torch.Tensor]) -> SamplingParameters:
    return SamplingParameters(
        temperature=change(parameters.temperature),
        top_k=change(parameters.top_k),
        top_p=change(parameters.top_p),
        min_p=change(parameters.min_p),
        seeds=change(parameters.seeds),
        offsets=change(parameters.offsets),
        num_logprobs=change(parameters.num_logprobs),
    )


def _theirs(way: _Way, logits: torch.Tensor) -> Callable[[], object] | None:
    """The largest logit; or, as engines built on torch draw, the largest of probabilities over exponential noise."""
    if way == _WAYS[0]:
        return lambda: logits.argmax(dim=-1)
    if way != _WAYS[1]:
        return None

    def race() -> torch.Tensor:
        probabilities = logits.softmax(dim=-1)
        return probabilities.div_(torch.empty_like(probabilities).exponential_()).argmax(dim=-1)

    return race

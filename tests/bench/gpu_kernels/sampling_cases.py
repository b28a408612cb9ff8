"""Draws from the logits of a large vocabulary, by the parameters and rules that rows have, and log-probabilities."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from gpu_kernels.case import Case, Place, Scale, Way, Work, error_of, mismatch_of, moved
from paceline_kernels.sampling import (
    PENALTIES,
    DrawRules,
    Logprobs,
    RuleTable,
    SamplingParameters,
    TokenLists,
    reference,
)
from paceline_kernels.sampling.triton import sample, token_logprobs

_NUM_CHECKED = 6  # rows that the reference draws for, too
_LOGPROB_ERROR = 1e-5
_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class DrawWay:
    """How tokens are drawn."""

    name: str
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    num_logprobs: int = -1
    num_seen: int = 0  # tokens of prompt and output that are penalised
    dtype: torch.dtype = torch.float32  # of logits

    @property
    def op(self) -> str:
        """What is more than a draw is an operation of its own."""
        return "sample + rules" if self.num_seen else "sample" if self.num_logprobs < 0 else "sample + best"


_WAYS = (
    DrawWay("greedy", temperature=0.0),
    DrawWay("all tokens"),
    DrawWay("top_k 50", top_k=50),
    DrawWay("top_p 0.9", top_p=0.9),
    DrawWay("min_p 0.05", min_p=0.05),
    DrawWay("5 logprobs", num_logprobs=5),
    DrawWay("2,048 seen", num_seen=2048),
    DrawWay("all tokens bfloat16", dtype=torch.bfloat16),
)
# What interpreting is worth here; the tests of the operation draw in all ways from odd vocabularies.
_FEW_WAYS = (
    DrawWay("7 seen", num_seen=7),
    DrawWay("all filters", top_k=50, top_p=0.9, min_p=0.05, num_logprobs=2),
    _WAYS[0],
)


def cases(scale: Scale, place: Place) -> Iterator[Case]:
    """Every way for as many rows as a large batch has; one row, and a vocabulary of an odd size."""
    if scale is Scale.ODD:
        yield from (sample_case(place, 2, 129, way) for way in _FEW_WAYS)
        yield _logprobs(place, 2, 129)
        return
    if scale is Scale.FULL:
        yield from (sample_case(place, 1, 128_256, way) for way in _WAYS[:2])
    yield from (sample_case(place, 256, 128_256, way) for way in _WAYS)
    yield _logprobs(place, 256, 128_256)


def sample_case(place: Place, num_rows: int, vocab: int, way: DrawWay) -> Case:
    def build(seed: int) -> Work:
        logits = _logits(place, num_rows, vocab, seed).to(way.dtype)
        parameters = parameters_of(way, num_rows, seed, _HOST)
        on_device = moved(parameters, place.device)
        rules = _rules(place, way, num_rows, vocab, seed) if way.num_seen else None

        def ours() -> torch.Tensor:
            return sample(logits, on_device, rules, None, way.num_logprobs).token_ids

        def error(how: Way) -> float:
            checked = slice(0, _NUM_CHECKED)
            first = None if rules is None else moved(dataclasses.replace(rules, rows=rules.rows[checked]), _HOST)
            expected = reference.sample(logits[checked].cpu().float(), _first(parameters, checked), first)
            return mismatch_of((how(ours)[checked], expected.token_ids))

        return Work(ours, _theirs(way, logits), error)

    shape: dict[str, int | str] = {"rows": num_rows, "vocab": vocab, "way": way.name}
    return Case(way.op, shape, build, num_bytes=num_rows * vocab * way.dtype.itemsize)


def _logits(place: Place, num_rows: int, vocab: int, seed: int) -> torch.Tensor:
    """Three times as wide as normal, so that the likeliest token of a row has a chance of some hundredths."""
    return 3 * place.normal(num_rows, vocab, seed=seed, dtype=torch.float32)


def _logprobs(place: Place, num_rows: int, vocab: int) -> Case:
    num_best = 5

    def build(seed: int) -> Work:
        logits, token_ids = _logits(place, num_rows, vocab, seed), place.integers(vocab, num_rows, seed=seed)
        wanted = torch.full((num_rows,), num_best, dtype=torch.int32, device=place.device)

        def ours() -> Logprobs:
            return token_logprobs(logits, token_ids, wanted, num_best)

        def theirs() -> object:
            every = logits.log_softmax(dim=-1)
            return every.gather(1, token_ids.long()[:, None]), every.topk(num_best)

        def error(way: Way) -> float:
            taken, every = way(ours), logits.double().log_softmax(dim=-1)
            best = every.gather(1, taken.top_token_ids.long())
            wrong = mismatch_of((every.topk(num_best).values, best))
            own = error_of(taken.logprobs, every.gather(1, token_ids.long()[:, None])[:, 0])
            return max(wrong, own, error_of(taken.top_logprobs, best))

        return Work(ours, theirs, error)

    return Case(
        op="token logprobs",
        shape={"rows": num_rows, "vocab": vocab, "best": num_best},
        build=build,
        num_bytes=num_rows * vocab * 4,
        allowed_error=_LOGPROB_ERROR,
    )


def _rules(place: Place, way: DrawWay, num_rows: int, vocab: int, seed: int) -> DrawRules:
    """All penalties of what was seen, half of it output; a word and a token that are forbidden in every row."""

    def column(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device=place.device)

    ends = torch.arange(num_rows + 1, dtype=torch.int32, device=place.device)
    none, one = TokenLists(0 * ends, ends[:0]), TokenLists(ends, column(7, torch.int32))
    token_ids = place.integers(vocab, num_rows, way.num_seen, seed=seed + 1)
    of_rows = RuleTable(
        allowed=none,
        biased=none,
        biases=column(0)[:0],
        min_tokens=column(way.num_seen, torch.int32),
        withheld=one,
        words=one,
        cu_words=ends,
        **dict(zip(PENALTIES, map(column, (0.5, 0.1, 1.1)), strict=True)),
    )
    rows = torch.arange(num_rows, dtype=torch.int32, device=place.device)
    return DrawRules(of_rows, rows, token_ids, column(way.num_seen - way.num_seen // 2, torch.int32))


def parameters_of(way: DrawWay, num_rows: int, seed: int, device: torch.device) -> SamplingParameters:
    """The same for all rows, but for their seeds."""

    def column(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device=device)

    places = torch.arange(num_rows, device=device)
    return SamplingParameters(
        temperature=column(way.temperature, torch.float32),
        top_k=column(way.top_k, torch.int32),
        top_p=column(way.top_p, torch.float32),
        min_p=column(way.min_p, torch.float32),
        seeds=places + 1000 * seed,
        offsets=column(way.num_seen // 2, torch.int32) if way.num_seen else places.int(),
        num_logprobs=column(way.num_logprobs, torch.int32),
    )


def _first(parameters: SamplingParameters, rows: slice) -> SamplingParameters:
    return SamplingParameters(*(getattr(parameters, field.name)[rows] for field in dataclasses.fields(parameters)))


def _theirs(way: DrawWay, logits: torch.Tensor) -> Callable[[], object] | None:
    """The largest logit; or, as engines built on torch draw, the largest of probabilities over exponential noise."""
    if way == _WAYS[0]:
        return lambda: logits.argmax(dim=-1)
    if way != _WAYS[1]:
        return None

    def race() -> torch.Tensor:
        probabilities = logits.softmax(dim=-1)
        return probabilities.div_(torch.empty_like(probabilities).exponential_()).argmax(dim=-1)

    return race

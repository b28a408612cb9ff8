"""From raw times to figures. Pure; the definitions are those of `vllm bench serve` (see `records`).

Percentiles interpolate linearly between the two nearest values, as numpy's do by default; deviations are those of the
whole population. Where there is no value there is no figure: None, not 0.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean

from paceline_cli.bench.errors import WorkloadError
from paceline_cli.bench.records import Answer, RequestFailure, RungRun, answer_of

MILLISECONDS = 1000.0
_OBJECTIVES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class LatencyStatistics:
    """Of one kind of time, in milliseconds."""

    mean: float
    median: float
    std: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Objectives:
    """What makes a request a good one: limits in milliseconds, each None where there is none."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    @classmethod
    def parse(cls, texts: Iterable[str]) -> "Objectives | None":
        """From texts such as `ttft:300`; None for none. `WorkloadError` for what is no such limit."""
        limits: dict[str, float] = {}
        for text in chain.from_iterable(text.replace(",", " ").split() for text in texts):
            name, _, value = text.partition(":")
            try:
                limits[name] = float(value)
            except ValueError:
                limits[name] = math.nan
            if name not in _OBJECTIVES or not limits[name] >= 0:
                raise WorkloadError(
                    f"--goodput: {text!r} is no objective: write ttft, tpot or e2el and milliseconds, such as ttft:300"
                )
        return cls(limits.get("ttft"), limits.get("tpot"), limits.get("e2el")) if limits else None

    def met_by(self, answer: Answer) -> bool:
        """Whether an answer is inside all limits; one of a single token has a TPOT of 0."""
        return all(
            limit is None or seconds * MILLISECONDS <= limit
            for limit, seconds in (
                (self.ttft, answer.ttft),
                (self.tpot, answer.tpot or 0.0),
                (self.e2el, answer.latency),
            )
        )


@dataclass(frozen=True, slots=True)
class FailureKind:
    kind: str
    count: int
    example: str
    """What the first of them said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of one rung. Rates count what was answered, per second of the whole rung."""

    duration_seconds: float
    num_completed: int
    num_failed: int
    num_interrupted: int
    """Sent and not ended when the rung was stopped."""
    num_short: int
    """Answers with fewer tokens than were asked for."""
    failures: tuple[FailureKind, ...]
    """The most frequent kind first."""
    num_input_tokens: int
    num_output_tokens: int
    num_cached_tokens: int | None
    """Input tokens from the prefix cache; None where the target does not say."""
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    """Drafts that became output: so many steps of a request were saved."""
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    max_output_tokens_per_s: float
    """In the best of the seconds since the start."""
    max_concurrent_requests: int
    ttft: LatencyStatistics | None
    tpot: LatencyStatistics | None
    itl: LatencyStatistics | None
    e2el: LatencyStatistics | None
    late: LatencyStatistics | None
    """How long after its time a request was sent; None in a closed loop."""
    goodput_share: float | None
    """Of all requests that ended, failed ones included. None without objectives."""
    request_goodput: float | None
    """Good requests per second."""
    cost_per_million_output_tokens: float | None
    cost_per_million_total_tokens: float | None


def summarise(run: RungRun, objectives: Objectives | None = None, cost_per_hour: float | None = None) -> Summary:
    """Costs are in the unit of `cost_per_hour`."""
    answers = [answer for record in run.records if (answer := answer_of(record)) is not None]
    failures = _failure_kinds([record.outcome for record in run.records if isinstance(record.outcome, RequestFailure)])
    num_failed = sum(failure.count for failure in failures)
    seconds = run.duration_seconds
    num_input = sum(answer.counted.num_prompt_tokens for answer in answers)
    num_output = sum(answer.counted.num_output_tokens for answer in answers)
    num_good = sum(objectives.met_by(answer) for answer in answers) if objectives is not None else None
    return Summary(
        duration_seconds=seconds,
        num_completed=len(answers),
        num_failed=num_failed,
        num_interrupted=len(run.records) - len(answers) - num_failed,
        num_short=sum(answer.counted.num_output_tokens < answer.planned.num_output_tokens for answer in answers),
        failures=failures,
        num_input_tokens=num_input,
        num_output_tokens=num_output,
        num_cached_tokens=_sum_if_known(answer.counted.num_cached_tokens for answer in answers),
        num_draft_tokens=sum(answer.counted.num_draft_tokens for answer in answers),
        num_accepted_draft_tokens=sum(answer.counted.num_accepted_draft_tokens for answer in answers),
        request_throughput=_rate(len(answers), seconds),
        output_throughput=_rate(num_output, seconds),
        total_token_throughput=_rate(num_input + num_output, seconds),
        max_output_tokens_per_s=_max_tokens_in_a_second(answers, run.started),
        max_concurrent_requests=_max_concurrent(answers),
        ttft=statistics_of(answer.ttft for answer in answers),
        tpot=statistics_of(tpot for answer in answers if (tpot := answer.tpot) is not None),
        itl=statistics_of(chain.from_iterable(answer.itls for answer in answers)),
        e2el=statistics_of(answer.latency for answer in answers),
        late=statistics_of(record.started - record.due for record in run.records if record.due is not None),
        goodput_share=None if num_good is None else _rate(num_good, len(answers) + num_failed),
        request_goodput=None if num_good is None else _rate(num_good, seconds),
        cost_per_million_output_tokens=_cost_per_million(cost_per_hour, seconds, num_output),
        cost_per_million_total_tokens=_cost_per_million(cost_per_hour, seconds, num_input + num_output),
    )


def statistics_of(values_seconds: Iterable[float]) -> LatencyStatistics | None:
    """From seconds to milliseconds; None of none."""
    ordered = sorted(value * MILLISECONDS for value in values_seconds)
    if not ordered:
        return None
    mean = fmean(ordered)
    return LatencyStatistics(
        mean=mean,
        median=percentile(ordered, 50),
        std=math.sqrt(fmean((value - mean) ** 2 for value in ordered)),
        p90=percentile(ordered, 90),
        p99=percentile(ordered, 99),
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The value below which so many percent lie, of values in rising order, at least one."""
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _failure_kinds(failures: Sequence[RequestFailure]) -> tuple[FailureKind, ...]:
    examples: dict[str, str] = {}
    for failure in failures:
        examples.setdefault(failure.kind, failure.message)
    counts = Counter(failure.kind for failure in failures)
    return tuple(FailureKind(kind, count, examples[kind]) for kind, count in counts.most_common())


def _rate(count: float, base: float) -> float:
    return count / base if base > 0 else 0.0


def _sum_if_known(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _cost_per_million(cost_per_hour: float | None, seconds: float, num_tokens: int) -> float | None:
    if cost_per_hour is None or num_tokens == 0:
        return None
    return cost_per_hour * seconds / 3600 / num_tokens * 1e6


def _max_tokens_in_a_second(answers: Iterable[Answer], started: float) -> float:
    tokens: defaultdict[int, float] = defaultdict(float)
    for answer in answers:
        # Which message carried how many tokens is not kept: an even share each.
        share = answer.counted.num_output_tokens / len(answer.times)
        for moment in answer.times:
            tokens[int(moment - started)] += share
    return max(tokens.values(), default=0.0)


def _max_concurrent(answers: Iterable[Answer]) -> int:
    steps = [step for answer in answers for step in ((answer.started, 1), (answer.times[-1], -1))]
    # One that ends when another starts makes room first.
    running = peak = 0
    for _, step in sorted(steps):
        running += step
        peak = max(peak, running)
    return peak

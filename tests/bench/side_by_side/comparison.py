"""How a line of the table is made: our figure, that of the best peer, and the ratio of the two against a target.

Ratios are formed within a repetition and their median is taken: a machine that is slow for a minute is so for both.
Knows no particular row.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import median

from side_by_side.engines import OURS
from side_by_side.results import Limits, Results, Sample


class Bound(Enum):
    """What a target is for the ratio of ours to theirs: of what more is better, and of what less is."""

    AT_LEAST = "≥"
    AT_MOST = "≤"


@dataclass(frozen=True, slots=True)
class Figure:
    """A value of a measurement: `of(values)` in the row's unit, None where the values do not hold it."""

    measurement: str
    of: Callable[[Mapping[str, float]], float | None]


@dataclass(frozen=True, slots=True)
class Row:
    """One line: our figure against the same figure of some engines, or against another figure of our own."""

    name: str
    unit: str
    ours: Figure
    against: tuple[tuple[str, Figure], ...]
    bound: Bound
    target: float
    limit_share: Callable[[Mapping[str, float], Limits], float] | None = None
    """The part of the machine's limit that our values reach."""
    engine: str = OURS
    """Whose our figure is."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A row with figures, medians of all repetitions; None where something was not measured."""

    row: Row
    ours: float | None
    best: str
    theirs: float | None
    ratio: float | None
    limit_share: float | None
    is_disturbed: bool

    @property
    def is_reached(self) -> bool:
        if self.ratio is None:
            return False
        return self.ratio >= self.row.target if self.row.bound is Bound.AT_LEAST else self.ratio <= self.row.target


def value(name: str, scale: float = 1.0) -> Callable[[Mapping[str, float]], float | None]:
    return lambda values: values[name] * scale if name in values else None


def rate(num_tokens: int, seconds: str) -> Callable[[Mapping[str, float]], float | None]:
    return lambda values: num_tokens / values[seconds] if seconds in values else None


def outcome(row: Row, results: Results) -> Outcome:
    """Make the line of a row: of several peers the best counts, by its median."""
    ours = _by_repetition(results.samples, row.engine, row.ours)
    others = {engine: _by_repetition(results.samples, engine, figure) for engine, figure in row.against}
    medians = {engine: median(figures.values()) for engine, figures in others.items() if figures}
    choose = max if row.bound is Bound.AT_LEAST else min
    best = choose(medians, key=lambda engine: medians[engine]) if medians else ""
    ratios = [ours[number] / theirs for number, theirs in others.get(best, {}).items() if number in ours and theirs]
    parts = {(row.engine, row.ours.measurement), *((engine, figure.measurement) for engine, figure in row.against)}
    return Outcome(
        row,
        median(ours.values()) if ours else None,
        best,
        medians.get(best),
        median(ratios) if ratios else None,
        _limit_share(row, results),
        any(each.is_disturbed for each in results.samples if (each.engine, each.measurement) in parts),
    )


def _by_repetition(samples: Sequence[Sample], engine: str, figure: Figure) -> dict[int, float]:
    found = {}
    for sample in samples:
        if sample.engine == engine and sample.measurement == figure.measurement:
            number = figure.of(sample.values)
            if number is not None:
                found[sample.repetition] = number
    return found


def _limit_share(row: Row, results: Results) -> float | None:
    samples = [
        each for each in results.samples if each.engine == row.engine and each.measurement == row.ours.measurement
    ]
    limits = results.best_limits
    if row.limit_share is None or not samples or limits is None:
        return None
    return median(row.limit_share(each.values, limits) for each in samples)

"""What a process counts, as plain values: one cheap addition when something happens, and read when somebody looks.

Knows names, labels and sums. Refuses to know how they are shown (`metrics_port`), and what they mean.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

Labels = tuple[str, ...]


class Kind(Enum):
    """How a metric is read."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


class Definition(NamedTuple):
    """A metric. `name` is without the prefix that all have; `bounds` are those of a histogram's buckets, ascending."""

    name: str
    kind: Kind
    meaning: str
    labels: Labels = ()
    bounds: tuple[float, ...] = ()


class Histogram:
    """How many values were at most each bound, and above the last."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add(self, counts: Sequence[int], total: float) -> None:
        """Add many values: how many belong in each bucket, and their sum."""
        for bucket, count in enumerate(counts):
            self.counts[bucket] += count
        self.total += total

    def copy(self) -> "Histogram":
        copied = Histogram(self.bounds)
        copied.add(self.counts, self.total)
        return copied


class Reading(NamedTuple):
    """A metric as it is now, by the values of its labels."""

    definition: Definition
    values: Mapping[Labels, float | Histogram]


class Meter:
    """Counters and histograms of a process, each with the values of its labels, which the caller bounds."""

    def __init__(self, definitions: Iterable[Definition]) -> None:
        self.settle: Callable[[], None] = _nothing
        """Called before anything is read: who counts may do so late."""
        self._definitions = {definition.name: definition for definition in definitions}
        self._counts: dict[str, dict[Labels, float]] = {}
        self._histograms: dict[str, dict[Labels, Histogram]] = {}
        for definition in self._definitions.values():
            if definition.kind is Kind.HISTOGRAM:
                self._histograms[definition.name] = {}
            else:
                self._counts[definition.name] = {}

    def add(self, name: str, amount: float, *labels: str) -> None:
        counts = self._counts[name]
        counts[labels] = counts.get(labels, 0) + amount

    def count(self, name: str, *labels: str) -> float:
        self.settle()
        return self._counts[name].get(labels, 0)

    def total(self, name: str) -> float:
        """Over all labels."""
        self.settle()
        return sum(self._counts[name].values())

    def counts(self, name: str) -> dict[str, int]:
        """Return whole sums by the value of their first label."""
        self.settle()
        return {labels[0]: int(count) for labels, count in self._counts[name].items()}

    def histogram(self, name: str, *labels: str) -> Histogram:
        histograms = self._histograms[name]
        found = histograms.get(labels)
        if found is None:
            found = histograms[labels] = Histogram(self._definitions[name].bounds)
        return found

    def observe(self, name: str, value: float, *labels: str) -> None:
        self.histogram(name, *labels).observe(value)

    def begin(self, label: str, value: str) -> None:
        """Show all metrics that have this label alone, from nothing on: else their first change would not be seen."""
        for name, definition in self._definitions.items():
            if definition.labels == (label,) and definition.kind is Kind.HISTOGRAM:
                self.histogram(name, value)
            elif definition.labels == (label,):
                self.add(name, 0, value)

    def forget(self, label: str, value: str) -> None:
        self.settle()
        for name, definition in self._definitions.items():
            if label in definition.labels:
                place = definition.labels.index(label)
                for table in (self._counts.get(name, {}), self._histograms.get(name, {})):
                    for labels in [labels for labels in table if labels[place] == value]:
                        del table[labels]

    def read(self) -> list[Reading]:
        """Return a copy of everything; counts without labels are there from the start."""
        self.settle()
        readings = []
        for name, definition in self._definitions.items():
            values: dict[Labels, float | Histogram] = {} if definition.labels else {(): 0}
            if definition.kind is Kind.HISTOGRAM:
                values = {labels: histogram.copy() for labels, histogram in self._histograms[name].items()}
            else:
                values.update(self._counts[name])
            readings.append(Reading(definition, values))
        return readings


def _nothing() -> None:
    """Everything is counted at once."""

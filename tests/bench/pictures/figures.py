"""What the pictures show, and how it is taken from the results of a run.

Knows the JSON of `side_by_side` and of `paceline chaos --json`. It refuses to know axes and colours.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from pictures.screens import Screen
from side_by_side.measurements import NUMS_OF_STREAMS, TIMELINE
from side_by_side.results import Results, Sample

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, slots=True)
class Load:
    """One engine under so many streams: medians over repetitions."""

    num_streams: int
    output_tok_s: float
    token_ms: float
    """Time between two tokens of one stream, from its first token to its last."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """Each engine's loads, in ascending order of streams."""

    source: str
    engines: Mapping[str, Sequence[Load]]


@dataclass(frozen=True, slots=True)
class Pauses:
    """For each kind of fault the pauses of all streams that it hit, ascending, in seconds."""

    source: str
    kinds: Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True)
class Step:
    """One step of an executor, as `WatchSteps` tells of it."""

    num_rows: int
    num_tokens: int
    busy_s: float
    idle_s: float
    """How long the executor waited before it."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """The steps of one run, in their order."""

    source: str
    steps: Sequence[Step]


def throughput_of(results: Results) -> Throughput:
    """What every engine of a run reached under its streams."""
    engines = {}
    for engine in results.engines:
        loads = [_load(number, _samples(results, f"streams-{number}", engine)) for number in NUMS_OF_STREAMS]
        if measured := [load for load in loads if load is not None]:
            engines[engine] = measured
    return Throughput(_source(results), engines)


def timeline_of(results: Results) -> Timeline:
    """The steps while a long prompt arrives beside running streams, of the run's first repetition.

    ValueError when the run did not measure them.
    """
    samples = [sample for sample in results.samples if sample.measurement == TIMELINE]
    if not samples:
        raise ValueError(f"the results hold no measurement {TIMELINE!r}; run side_by_side without --only")
    answers: Any = samples[0].raw
    steps = [Step(**step) for answer in answers for step in answer["steps"] if step["num_rows"]]
    return Timeline(_source(results), steps)


def pauses_of(report: Mapping[str, Any], source: str) -> Pauses:
    """What a chaos run's report says of pauses."""
    kinds: dict[str, list[float]] = {}
    for fault in report["faults"]:
        if fault["stalls_seconds"]:
            kinds.setdefault(fault["kind"], []).extend(fault["stalls_seconds"])
    return Pauses(source, {kind: sorted(pauses) for kind, pauses in kinds.items()})


def save(figures: Throughput | Pauses | Timeline | Screen) -> None:
    """Keep the figures of a picture, in place of the older ones."""
    path = DATA / f"{type(figures).__name__.lower()}.json"
    path.write_text(json.dumps(asdict(figures)) + "\n", encoding="utf-8")


def load_throughput() -> Throughput:
    """The figures that are kept."""
    fields = _fields("throughput")
    engines = {name: [Load(**load) for load in loads] for name, loads in fields["engines"].items()}
    return Throughput(fields["source"], engines)


def load_pauses() -> Pauses:
    """The figures that are kept."""
    return Pauses(**_fields("pauses"))


def load_timeline() -> Timeline:
    """The figures that are kept."""
    fields = _fields("timeline")
    return Timeline(fields["source"], [Step(**step) for step in fields["steps"]])


def load_screen() -> Screen:
    """The screen that is kept."""
    fields = _fields("screen")
    return Screen(fields["source"], [[(style, text) for style, text in line] for line in fields["lines"]])


def _fields(name: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    return fields


def _source(results: Results) -> str:
    return f"{results.date[:10]}, {results.machine}"


def _samples(results: Results, measurement: str, engine: str) -> list[Sample]:
    return [sample for sample in results.samples if (sample.measurement, sample.engine) == (measurement, engine)]


def _load(num_streams: int, samples: Sequence[Sample]) -> Load | None:
    if not samples:
        return None
    output_tok_s = median(sample.values["output_tok_s"] for sample in samples)
    return Load(num_streams, round(output_tok_s, 1), round(1e3 * median(_token_seconds(samples)), 3))


def _token_seconds(samples: Iterable[Sample]) -> Iterable[float]:
    for sample in samples:
        answers: Any = sample.raw
        for answer in answers:
            for times in answer["token_s"]:
                yield (times[-1] - times[0]) / (len(times) - 1)

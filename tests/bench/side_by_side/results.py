"""What a run leaves behind: every answer with its circumstances, and the file that holds them.

Plain data and its JSON form. Knows nothing of rows and targets: a table can be printed again from a file.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path

FORMAT = 1
MAX_OTHERS_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """An engine of the run. `problem` says why it was not measured, or not to the end; empty when all went well."""

    name: str
    version: str = ""
    harness: str = ""
    configuration: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """One engine's answer to one measurement in one repetition.

    `values` are what the measurement makes of the answer: seconds, bytes, tokens per second. `others_share` is the part
    of the machine's CPU time that neither the engine nor the benchmark took; `busy_share` how busy it was just before.
    """

    measurement: str
    engine: str
    repetition: int
    values: Mapping[str, float]
    busy_share: float
    others_share: float
    waited_s: float
    load_average: float
    raw: object = None

    @property
    def is_disturbed(self) -> bool:
        """Whether something else was using the machine to speak of, before or meanwhile."""
        return max(self.busy_share, self.others_share) > MAX_OTHERS_SHARE


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine can do at most, in one repetition."""

    read_gb_per_s: float
    int8_gop_per_s: float
    float32_gflop_per_s: float


@dataclass(slots=True)
class Results:
    """A whole run."""

    date: str
    machine: str
    engines: dict[str, EngineFacts] = field(default_factory=dict)
    limits: list[Limits] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    @property
    def best_limits(self) -> Limits | None:
        """The best that the machine did in any repetition: what bounds it, not what else it was busy with."""
        if not self.limits:
            return None
        return Limits(*(max(values) for values in zip(*map(astuple, self.limits), strict=True)))


def save(results: Results, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"format": FORMAT, **asdict(results)}) + "\n", encoding="utf-8")


def load(path: Path) -> Results:
    """Read a run. ValueError when the file is of another form."""
    document = json.loads(path.read_text(encoding="utf-8"))
    if document.get("format") != FORMAT:
        raise ValueError(f"{path} is not a results file of this version")
    return Results(
        document["date"],
        document["machine"],
        {name: EngineFacts(**facts) for name, facts in document["engines"].items()},
        [Limits(**limits) for limits in document["limits"]],
        [Sample(**sample) for sample in document["samples"]],
    )

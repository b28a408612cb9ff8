"""How long the steps of a simulated device take: a table, read from a JSON file.

    {"points": [{"num_tokens": 1, "duration_us": 5000}, {"num_tokens": 2048, "duration_us": 210000}],
     "us_per_million_pairs": 40}

A point is a step of so many tokens; times in between lie on the line between neighbours, times beyond on the line
through the last two. A pair is a new token together with one token it attends to, itself included, and costs the same
everywhere. `num_pairs` of a point, 0 if left out, says how many its measured duration includes.
"""

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from paceline.process.small_files import read_small_file
from paceline_executor.errors import StepTimesError

_MAX = 1 << 40  # of tokens, of pairs, and of microseconds: twelve days


@dataclass(frozen=True, slots=True)
class StepTimeCurve:
    """Ascending by number of tokens; without points steps take no time."""

    points: tuple[tuple[int, float], ...] = ()  # (num_tokens, ns), without what their pairs cost
    ns_per_pair: float = 0.0

    def step_ns(self, num_tokens: int, num_pairs: int) -> int:
        return round(max(0.0, self._line_ns(num_tokens)) + self.ns_per_pair * num_pairs)

    def _line_ns(self, num_tokens: int) -> float:
        lines = list(pairwise(self.points))
        if not lines:
            return self.points[0][1] if self.points else 0.0
        left, right = next((line for line in lines if num_tokens <= line[1][0]), lines[-1])
        slope = (right[1] - left[1]) / (right[0] - left[0])
        return left[1] + slope * (num_tokens - left[0])


def read_step_times(path: Path) -> StepTimeCurve:
    """Raises StepTimesError, which names the file and the line or field at fault."""
    try:
        return _table(json.loads(read_small_file(path)))
    except OSError as error:
        raise StepTimesError(f"cannot read {path}: {error.strerror or error}; check --runner simulated:FILE") from error
    except (ValueError, RecursionError) as error:
        raise StepTimesError(f"{path} has no step times: {error}; correct it, or leave it out of --runner") from error


def _table(value: object) -> StepTimeCurve:
    table = _object("the file", value, {"points", "us_per_million_pairs"})
    listed = table.get("points")
    if not isinstance(listed, list) or not listed:
        raise ValueError('points is not a list of at least one {"num_tokens": 1, "duration_us": 5000}')
    ns_per_pair = _number("us_per_million_pairs", table.get("us_per_million_pairs", 0)) / 1e3
    points = tuple(_point(f"points[{i}]", value, ns_per_pair) for i, value in enumerate(listed))
    for i, (left, right) in enumerate(pairwise(points), start=1):
        if right[0] <= left[0]:
            raise ValueError(f"points[{i}].num_tokens is {right[0]}, which does not come after {left[0]}")
    return StepTimeCurve(points, ns_per_pair)


def _point(name: str, value: object, ns_per_pair: float) -> tuple[int, float]:
    fields = _object(name, value, {"num_tokens", "num_pairs", "duration_us"})
    num_tokens = _count(f"{name}.num_tokens", fields.get("num_tokens"), 1)
    num_pairs = _count(f"{name}.num_pairs", fields.get("num_pairs", 0), 0)
    return num_tokens, _number(f"{name}.duration_us", fields.get("duration_us")) * 1e3 - ns_per_pair * num_pairs


def _object(name: str, value: object, known: set[str]) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not a JSON object")
    if unknown := sorted(value.keys() - known):
        raise ValueError(f"{name} has a field {unknown[0][:80]!r}; known are {', '.join(sorted(known))}")
    return value


def _count(name: str, value: object, least: int) -> int:
    if type(value) is not int or not least <= value <= _MAX:
        raise ValueError(f"{name} is not a whole number from {least} to {_MAX}")
    return value


def _number(name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= _MAX:
        raise ValueError(f"{name} is not a number from 0 to {_MAX}")
    return float(value)

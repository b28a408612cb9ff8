"""The metrics of the schedulers as they are read, and what they add up to over a span of time. Knows none by name."""

import asyncio
import http.client
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_PREFIX = "paceline_"
_STARTED = "process_start_time_seconds"
_TIMEOUT_S = 2.0

Samples = Mapping[str, float]
"""By name and labels, as they are written."""


@dataclass(frozen=True, slots=True)
class Claims:
    """What was claimed of a span of time, by all schedulers together."""

    samples: Samples
    is_whole: bool
    """Whether every scheduler of its beginning is there yet."""

    def sum_of(self, name: str, *labels: str) -> float:
        """Over all samples of the name that have each of the labels, such as `kind="executor"`."""
        return sum(
            value
            for key, value in self.samples.items()
            if key.partition("{")[0] == _PREFIX + name and all(label in key for label in labels)
        )

    def mean_s(self, name: str) -> float:
        return self.sum_of(f"{name}_seconds_sum") / max(self.sum_of(f"{name}_seconds_count"), 1)


async def read(ports: Iterable[int]) -> dict[int, Samples]:
    """By port; those that do not answer are left out."""
    answers = {port: await asyncio.to_thread(_read, port) for port in ports}
    return {port: samples for port, samples in answers.items() if samples}


def between(before: Mapping[int, Samples], after: Mapping[int, Samples]) -> Claims:
    total, same = dict[str, float](), 0
    for port, samples in after.items():
        base = before.get(port, {})
        is_same = base.get(_STARTED) == samples.get(_STARTED)
        same += is_same
        for name, value in samples.items():
            total[name] = total.get(name, 0.0) + value - (base.get(name, 0.0) if is_same else 0.0)
    return Claims(total, is_whole=bool(before) and same == len(before))


def _read(port: int) -> dict[str, float]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}
    except (OSError, ValueError, http.client.HTTPException):
        return {}  # it is frozen, dead, or starts
    finally:
        connection.close()

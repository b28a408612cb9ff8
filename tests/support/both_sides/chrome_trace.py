"""Whether a file is a Chrome trace, and what is in one, by the format's own rules.

Knows https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU, and of our traces that steps have
a category of their own.
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_ROUNDING_US = 0.01
_PHASES = frozenset("BEXiICnbeSTpFsftPNODMVvRcG(){}")  # each `ph` that the format has


@dataclass(frozen=True, slots=True)
class TracedEvent:
    """A complete event, in microseconds."""

    track: tuple[int, int]  # process and thread
    category: str
    name: str
    start_us: float
    end_us: float
    args: dict[str, Any]
    parent: "TracedEvent | None"  # the shortest around it on its track

    def is_within(self, other: "TracedEvent") -> bool:
        return other.start_us - _ROUNDING_US <= self.start_us and self.end_us <= other.end_us + _ROUNDING_US


class NoTraceError(AssertionError):
    """What the format does not allow."""


def read_trace(text: bytes) -> list[TracedEvent]:
    """The complete events, sorted by their start. Raises NoTraceError."""
    events = json.loads(text)["traceEvents"]
    tracks: defaultdict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("ph") not in _PHASES or not isinstance(event.get("name"), str):
            raise NoTraceError(f"an event has no phase or name: {event}")
        if event["ph"] == "X":
            _check_complete(event)
            tracks[event["pid"], event["tid"]].append(event)
    return sorted((one for track in tracks.values() for one in _nested(track)), key=lambda one: one.start_us)


def steps_of(events: Iterable[TracedEvent]) -> list[TracedEvent]:
    return [event for event in events if event.category == "step"]


def check_steps(events: list[TracedEvent]) -> None:
    """What a thread did inside of a step took no longer than it. Raises NoTraceError."""
    phases = [event for event in events if event.category == "phase" and event.parent is None]
    for step in steps_of(events):
        inside = [phase for phase in phases if phase.is_within(step)]
        took_us: defaultdict[tuple[int, int], float] = defaultdict(float)
        for one in inside:
            took_us[one.track] += one.end_us - one.start_us
        if not inside or max(took_us.values()) > step.end_us - step.start_us + _ROUNDING_US:
            raise NoTraceError(f"{step.name} does not hold its phases: {inside}")


def _check_complete(event: dict[str, Any]) -> None:
    numbers = [event.get(name) for name in ("ts", "dur")]
    if not all(isinstance(number, int | float) and number >= 0 for number in numbers):
        raise NoTraceError(f"an event has no time: {event}")
    if not all(type(event.get(name)) in (int, str) for name in ("pid", "tid")):
        raise NoTraceError(f"an event is on no track: {event}")


def _nested(track: list[dict[str, Any]]) -> Iterable[TracedEvent]:
    """Events of one track lie side by side or in each other."""
    open_events: list[TracedEvent] = []
    for event in sorted(track, key=lambda one: (one["ts"], -one["dur"])):
        while open_events and open_events[-1].end_us <= event["ts"] + _ROUNDING_US:
            open_events.pop()
        parent = open_events[-1] if open_events else None
        times = event["ts"], event["ts"] + event["dur"]
        track_id, category = (event["pid"], event["tid"]), event.get("cat", "")
        read = TracedEvent(track_id, category, event["name"], *times, event.get("args", {}), parent)
        if parent is not None and not read.is_within(parent):
            raise NoTraceError(f"{read} begins in {parent} and ends behind it")
        yield read
        open_events.append(read)

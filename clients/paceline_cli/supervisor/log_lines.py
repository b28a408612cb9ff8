"""What a child prints, as events: JSON log lines where they are such, plain text where they are not.

Knows the names of the events that mean progress. Everything else is a line for people.
"""

import enum
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

MAX_LINE_BYTES = 64 * 1024

PHASES = {
    "model_fetch": "fetching the model",
    "model_load": "loading the model",
    "warm_up": "warming up",
    "validate": "predicting",
    "waiting_for_executor": "waiting for an executor",
    # Beside its programs `up` says what becomes of them; that a scheduler does not reach one is no news of its own.
    "executor_unreachable": "waiting for an executor",
    "waiting_in_line": "waiting in the queue at an executor",
}
_COMPILING = "compiling for this processor, once, a minute or two"
_MAX_DETAIL_CHARS = 40
READY_EVENT = "ready"
_FINISHING = ("draining", "still_running")


class Level(enum.IntEnum):
    INFO = 1
    WARNING = 2
    ERROR = 3


_LEVELS = {"warning": Level.WARNING, "warn": Level.WARNING, "error": Level.ERROR, "critical": Level.ERROR}


@dataclass(frozen=True, slots=True)
class Progress:
    """The child is busy starting. `fraction` is 0 to 1, None where it does not say."""

    phase: str
    fraction: float | None


@dataclass(frozen=True, slots=True)
class Ready:
    """The child serves, or stands by to do so."""

    stands_by: bool = False


@dataclass(frozen=True, slots=True)
class OtherLine:
    """Anything else, in words."""

    level: Level
    text: str


@dataclass(frozen=True, slots=True)
class Finishing:
    """The child ends once so many requests have."""

    num_requests: int


Line = Progress | Ready | Finishing | OtherLine


def parse_line(raw: bytes, default_level: Level) -> Line:
    """One line of output. Never fails: what is not a log line is text at the default level."""
    text = raw.decode("utf-8", errors="replace").strip()
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        # The second: brackets nested so deep that no service wrote them.
        return OtherLine(default_level, text)
    if not isinstance(fields, dict) or not isinstance(fields.get("event"), str):
        return OtherLine(default_level, text)
    event = fields["event"]
    if event == READY_EVENT:
        return Ready(fields.get("standby") is True)
    if event in PHASES:
        return Progress(_phase(fields), _fraction(fields.get("fraction")))
    num_requests = fields.get("num_requests")
    if event in _FINISHING and isinstance(num_requests, int) and not isinstance(num_requests, bool):
        return Finishing(num_requests)
    level = fields.get("level")
    return OtherLine(_LEVELS.get(level, Level.INFO) if isinstance(level, str) else Level.INFO, _words(fields))


class LineSplitter:
    """Cuts what arrives into lines. A line beyond the limit is cut short: nothing a child prints fills the memory."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Those that are complete now."""
        *complete, rest = data.split(b"\n")
        for part in complete:
            self._keep(part)
            yield bytes(self._rest)
            self._rest.clear()
        self._keep(rest)

    def end(self) -> Iterator[bytes]:
        """The last line, where it has no end."""
        if self._rest:
            yield bytes(self._rest)
            self._rest.clear()

    def _keep(self, part: bytes) -> None:
        self._rest += part[: MAX_LINE_BYTES - len(self._rest)]


def _phase(fields: dict[str, object]) -> str:
    """What is being done, in words, and the detail that the child gives, as far as it fits beside a bar."""
    event = PHASES[str(fields["event"])]
    for name in ("phase", "reason"):
        detail = fields.get(name)
        if isinstance(detail, str) and detail:
            is_compiled = fields["event"] == "warm_up" and "compile " in detail
            return f"{_COMPILING if is_compiled else event} ({_short(detail)})"
    return event


def _short(detail: str) -> str:
    """The part of a sentence that says most. Of an error of gRPC that is its end."""
    text = detail.rpartition(": ")[2] if "last error: " in detail else re.sub(r"^[A-Z_]+: ", "", detail)
    return text.partition(";")[0][:_MAX_DETAIL_CHARS]


def _fraction(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, float) and math.isnan(value):
        return None
    # Clamped before it becomes a float: an integer may be too large for one.
    return float(min(max(value, 0), 1))


def _words(fields: dict[str, object]) -> str:
    """A log line in words: its event, and why where it says so."""
    event = str(fields["event"])
    for name in ("message", "error", "reason", "exception"):
        why = fields.get(name)
        if isinstance(why, str) and why.strip():
            # Of a traceback the last line is the error.
            return f"{event}: {why.strip().splitlines()[-1]}"
    return event

"""How long a line of the log may be, and how often one cause is told: what a peer says or does fills no disk.

Knows events as dicts. Refuses to know where lines go.
"""

import json
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, MutableMapping
from dataclasses import dataclass
from typing import Any

MAX_LINE_BYTES = 1024
"""Of a line without its traceback, which only a mistake of this program has."""

MAX_TRACEBACK_CHARACTERS = 16_384
BURST = 8
"""So many lines of one cause may follow one another; then one a second is written, the last of those that came."""

MAX_CAUSES = 1024
_CAUSE_FIELDS = ("event", "address", "method")
_OF_A_PEER = ("address", "method", "request_id")
OPERATOR = "operator"
"""As the field `by`: what an operator did is always told."""

ASKED_FOR = frozenset({"request_finished", "request_refused"})
"""Lines of which an operator chose the number."""

_TRACEBACK = "exception"
_FIRST = ("timestamp", "level", "event")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_Event = MutableMapping[str, Any]


def shortened(event: _Event) -> _Event:
    """Return an event whose line is short enough and holds nothing that a terminal would act on."""
    short = {key: _plain(value) for key, value in event.items() if key != _TRACEBACK}
    while len(json.dumps(short, default=str)) > MAX_LINE_BYTES - 1:
        longest = max(
            (key for key in short if key not in _FIRST), key=lambda key: len(_written(short[key])), default=""
        )
        if not longest:
            break
        short[longest] = _cut(short[longest])
    if _TRACEBACK in event:
        short[_TRACEBACK] = _middle_cut(str(event[_TRACEBACK]))
    return short


def _plain(value: object) -> object:
    """Return a value as it may stand in a line; what is no number and too long becomes the beginning of its text."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if not isinstance(value, str) and len(_written(value)) <= MAX_LINE_BYTES:
        return value
    text = str(value)
    return _CONTROL.sub(" ", text if len(text) <= MAX_LINE_BYTES else text[:MAX_LINE_BYTES] + "…")


def _written(value: object) -> str:
    return json.dumps(value, default=str)


def _cut(value: object) -> str:
    text = value if isinstance(value, str) else _written(value)
    return text.rstrip("…")[: len(text) * 2 // 3] + "…" if len(text) > 2 else ""  # a letter and the mark


def _middle_cut(text: str) -> str:
    if len(text) <= MAX_TRACEBACK_CHARACTERS:
        return text
    half = MAX_TRACEBACK_CHARACTERS // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters …\n{text[-half:]}"


@dataclass(slots=True)
class _Cause:
    allowance: float
    counted_s: float
    held_until_s: float | None = None  # when the line that is held back for it goes out
    num_unsaid: int = 0


class CauseLimit:
    """Says of each event when its line may be written."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._causes: OrderedDict[Hashable, _Cause] = OrderedDict()

    def admit(self, event: _Event) -> tuple[Hashable, float | None]:
        """Return an event's cause and until when its line is held back, None if it is not.

        A later one of the same cause takes the place of one that is held back, and says how many were not written.
        What has nothing to do with a peer is not held back, nor what an operator did.
        """
        key = tuple(str(event.get(field, "")) for field in _CAUSE_FIELDS)
        if (
            event.get("by") == OPERATOR
            or event.get("event") in ASKED_FOR
            or not any(field in event for field in _OF_A_PEER)
        ):
            return key, None
        now_s = self._clock()
        cause = self._causes.setdefault(key, _Cause(BURST, now_s))
        self._causes.move_to_end(key)
        if len(self._causes) > MAX_CAUSES:
            self._causes.popitem(last=False)
        if cause.held_until_s is not None and now_s < cause.held_until_s:
            cause.num_unsaid += 1
            event["num_unsaid"] = cause.num_unsaid
            return key, cause.held_until_s
        if cause.held_until_s is not None:  # that line has taken the place of this moment
            cause.allowance, cause.counted_s, cause.held_until_s, cause.num_unsaid = 0.0, cause.held_until_s, None, 0
        cause.allowance = min(BURST, cause.allowance + now_s - cause.counted_s)
        cause.counted_s = now_s
        if cause.allowance >= 1:
            cause.allowance -= 1
            return key, None
        cause.held_until_s = now_s + 1 - cause.allowance
        return key, cause.held_until_s

"""Texts of a peer as they may be shown: in a log, on a terminal, to a client.

Apart, as who shows a text need know nothing else of the protocol.
"""

import re

MAX_SENTENCE_BYTES = 2048
"""The longest sentence for people that travels: what went wrong, why an executor goes."""

MAX_NAME_BYTES = 256
"""The longest name or address that travels."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def has_control_characters(text: str) -> bool:
    """Tell whether a text holds what a terminal would act on: line ends, escapes, changes of direction."""
    return _CONTROL.search(text) is not None


def readable(text: str, at_most: int = MAX_SENTENCE_BYTES) -> str:
    """Return a text as one line without control characters, of at most so many bytes of UTF-8."""
    plain = _CONTROL.sub(" ", text[:at_most])
    data = plain.encode(errors="replace")
    if len(data) <= at_most and len(text) <= at_most:
        return plain
    return data[: at_most - 3].decode(errors="ignore") + "…"

"""Regular expressions of clients, before any compiler sees them."""

import re

from paceline.forms.errors import FormError, Reason

MAX_REPETITIONS = 10_000  # the product of the counts around one part

_COUNTS = re.compile(r"\{\s*(\d*)\s*(?:,\s*(\d*)\s*)?\}")
_MAX_DIGITS = 9


def check_pattern(pattern: str, field: str, name: str) -> None:
    """A few bytes of nested counts cost the compiler seconds, at its first mask. Raises FormError."""
    num_repetitions = max_repetitions(pattern)
    if num_repetitions > MAX_REPETITIONS:
        shown = f"{num_repetitions} times" if num_repetitions < 10**_MAX_DIGITS else "too often"
        sentence = f"{name} repeats a part {shown}, at most {MAX_REPETITIONS} times are allowed"
        raise FormError(Reason.TOO_LARGE, field, sentence)


def max_repetitions(pattern: str) -> int:
    """Returns the largest product of nested counts: of `(a{2}b{3}){4}` 12."""
    groups = [1]  # of each open group, the largest so far
    part = 1
    at, is_class = 0, False
    while at < len(pattern):
        sign = pattern[at]
        counts = None if is_class or sign != "{" else _COUNTS.match(pattern, at)
        if counts:
            part *= max(1, *(_count(digits) for digits in counts.groups(default="")))
            at = counts.end()
        else:
            at += 2 if sign == "\\" else 1
            if is_class or sign == "[":
                is_class, part = sign != "]", 1
            elif sign == "(":
                groups.append(1)
                part = 1
            elif sign == ")" and len(groups) > 1:
                part = groups.pop()
            elif sign not in "?*+":
                part = 1
        groups[-1] = max(groups[-1], part)
    return max(groups)


def lark_regex(pattern: str) -> str:
    """Returns the pattern between the slashes of Lark."""
    return "/" + re.sub(r"(?s)\\?\n|\\.|/", _escaped, pattern) + "/"


def _escaped(found: re.Match[str]) -> str:
    text = found.group()
    if text.endswith("\n"):
        return r"\n"
    return r"\/" if text == "/" else text


def _count(digits: str) -> int:
    return 10**_MAX_DIGITS if len(digits) > _MAX_DIGITS else int(digits or 0)

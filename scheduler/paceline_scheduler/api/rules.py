"""The kinds of rule that a field may have to keep: ranges, counts, lengths, ids inside a vocabulary.

Knows no field. Every rule raises InvalidRequestError, which names the one it was given.
"""

import math
from collections.abc import Sequence

import numpy as np

from paceline.plan.values import Int32Array
from paceline_scheduler.errors import InvalidRequestError


def check_range(field: str, value: float | None, low: float, high: float = math.inf, *, is_open: bool = False) -> None:
    """Refuse a number outside `low` to `high`; where `is_open` also `low` itself. Unset is fine."""
    if value is None:
        return
    # NaN is inside no range, so it must be asked whether the value is in, not whether it is out.
    if not ((low < value if is_open else low <= value) and value <= high):
        shown = value if isinstance(value, int) else f"{value:.7g}"
        start = f"above {low}" if is_open else f"at least {low}"
        end = "" if math.isinf(high) else f" and at most {high}"
        raise InvalidRequestError(field, f"is {shown}, must be {start}{end}")


def check_count(field: str, count: int, at_least: int, at_most: int) -> None:
    """Refuse a list that is too short or too long."""
    if not at_least <= count <= at_most:
        raise InvalidRequestError(field, f"has {count} items, must have {at_least} to {at_most}")


def check_num_bytes(field: str, text: str, at_most: int) -> None:
    """Refuse a text that is too long as UTF-8."""
    num_bytes = len(text.encode())
    if num_bytes > at_most:
        raise InvalidRequestError(field, f"has {num_bytes} bytes, at most {at_most} are allowed")


def check_token_ids(field: str, token_ids: Int32Array, vocab_size: int) -> None:
    """Refuse ids outside the vocabulary; names the first one."""
    outside = np.flatnonzero((token_ids < 0) | (token_ids >= vocab_size))
    if outside.size:
        index = int(outside[0])
        raise InvalidRequestError(
            f"{field}[{index}]", f"is {token_ids[index]}, the vocabulary has 0 to {vocab_size - 1}"
        )


def check_ids(field: str, token_ids: Sequence[int], at_most: int, vocab_size: int) -> Sequence[int]:
    """Return token ids; refuses too many, and those outside the vocabulary."""
    check_count(field, len(token_ids), 0, at_most)
    check_token_ids(field, np.array(token_ids, dtype=np.int32), vocab_size)
    return token_ids


def check_texts(field: str, texts: Sequence[str], at_most: int, max_chars: int) -> tuple[str, ...]:
    """Return texts; refuses too many, empty ones, and those that are too long."""
    check_count(field, len(texts), 0, at_most)
    for index, text in enumerate(texts):
        if not 1 <= len(text) <= max_chars:
            raise InvalidRequestError(f"{field}[{index}]", f"has {len(text)} characters, must have 1 to {max_chars}")
    return tuple(texts)

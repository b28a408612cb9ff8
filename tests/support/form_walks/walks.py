"""Outputs drawn at random from what a form allows, and what two validators say of them that share no code with it."""

import json
import math
import random
import sys
from collections.abc import Iterator
from enum import Enum
from functools import cache
from typing import Any

import jsonschema
import jsonschema_rs
from llguidance import LLMatcher, LLTokenizer

from paceline.forms.compiling import LIMITS

_TEMPERATURE = 2.0
# What ends strings, lists, objects and outputs is likelier, else most walks would not come to their end.
_ENDS = {ord('"'): 30.0, ord("}"): 20.0, ord("]"): 20.0}
_END_WEIGHT = 50.0
MAX_BYTES = 3000


class WalkEnd(Enum):
    ENDED = "ended"
    OPEN = "open"
    STUCK = "stuck"
    FAILED = "failed"


@cache
def tokenizer() -> LLTokenizer:
    """Of bytes."""
    return LLTokenizer("byte")


def matcher_of(grammar: str) -> LLMatcher:
    return LLMatcher(tokenizer(), grammar, log_level=0, limits=LIMITS)


def takes(grammar: str, text: str) -> bool:
    """Whether the text is a whole output."""
    matcher, data = matcher_of(grammar), list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def walk(grammar: str, seed: str) -> tuple[WalkEnd, str]:
    """Draws at a temperature of 2 from logits of its own. Returns how the output ended, and its text."""
    matcher, chance = matcher_of(grammar), random.Random(seed)  # noqa: S311 (repeatable)
    weights = [math.exp(chance.gauss(0, 1) / _TEMPERATURE) * _ENDS.get(byte, 1.0) for byte in range(256)]
    output = bytearray()
    while len(output) < MAX_BYTES:
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            return WalkEnd.FAILED, output.decode(errors="replace")
        allowed = [byte for byte in range(256) if mask[byte >> 3] >> (byte & 7) & 1]
        can_end = matcher.is_accepting()
        if not allowed and not can_end:
            return WalkEnd.STUCK, output.decode(errors="replace")
        of_each = [*(weights[byte] for byte in allowed), _END_WEIGHT if can_end else 0.0]
        (byte,) = chance.choices([*allowed, -1], of_each)
        if byte < 0:
            return WalkEnd.ENDED, output.decode()
        matcher.consume_token(byte)
        output.append(byte)
    return WalkEnd.OPEN, output.decode(errors="replace")


class Validators:
    """Of one schema."""

    def __init__(self, schema: Any) -> None:  # noqa: ANN401 (any JSON)
        self._python = jsonschema.validators.validator_for(schema)(schema)
        self._rust = jsonschema_rs.validator_for(schema)

    def complaints(self, text: str) -> Iterator[str]:
        """Of either."""
        value = json.loads(text, parse_float=_finite)
        yield from (error.message for error in self._python.iter_errors(value))
        if not self._rust.is_valid(value):
            yield "jsonschema-rs takes it for invalid"


def _finite(text: str) -> float:
    """JSON has numbers beyond doubles, validators have not."""
    return max(-sys.float_info.max, min(float(text), sys.float_info.max))

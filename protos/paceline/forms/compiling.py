"""Whether a form can be compiled and followed, found by doing so with a tokenizer of bytes.

The library never raises: what it cannot do becomes masks that end the output. So each is asked for an error.
"""

import json
import random
import re
from functools import cache

import llguidance
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from paceline.forms.errors import FormError, Reason
from paceline.forms.grammar import FIELD, grammar_of
from paceline.forms.library import LIBRARY, VERSION
from paceline.forms.schemas import place_of
from paceline.v1 import sampling_pb2

if llguidance.__version__ != VERSION:
    raise ImportError(f"llguidance {llguidance.__version__} is installed; this version of paceline takes {LIBRARY}")

LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=60_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    verbose_errors=False,  # nothing of a request in logs
)
"""Of each compile and mask; the library's own let one step take 14 ms and half a gigabyte."""

_NUM_STEPS = 64
_BITS = tuple(tuple(bit for bit in range(8) if bits >> bit & 1) for bits in range(256))
_KEYS = re.compile(r'Unimplemented keys: \["([^"]*)"')
_TOO_COMPLEX = re.compile(
    r"fuel|too (?:complex|large|big|many|deep)|limit|exceed|max is|unable to determine", re.IGNORECASE
)
_UNSUPPORTED = re.compile(r"not (?:yet )?supported|unimplemented|unknown special|not implemented", re.IGNORECASE)


def check_form(structured: sampling_pb2.StructuredOutput) -> None:
    """Compiles it, and follows it for some random bytes. Bounds neither time nor memory. Raises FormError."""
    matcher = LLMatcher(_tokenizer(), grammar_of(structured), log_level=0, limits=LIMITS)
    chance = random.Random(structured.SerializeToString(deterministic=True))  # noqa: S311 (the same each time)
    for _ in range(_NUM_STEPS):
        allowed = _allowed_bytes(matcher)
        if matcher.is_error():
            raise _refusal(structured, matcher.get_error())
        if not allowed:
            if matcher.is_accepting():
                return
            raise FormError(Reason.UNSUPPORTED, _field(structured), "allows nothing behind some beginning of it")
        # Random bytes alone would hardly leave the first string.
        matcher.consume_token(chance.choice(allowed + allowed.count(ord('"')) * (len(allowed) // 3) * [ord('"')]))


@cache
def _tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def _allowed_bytes(matcher: LLMatcher) -> list[int]:
    mask = matcher.compute_bitmask()[:32]
    return [8 * index + bit for index, bits in enumerate(mask) for bit in _BITS[bits]]


def _field(structured: sampling_pb2.StructuredOutput) -> str:
    return f"{FIELD}.{structured.WhichOneof('constraint')}"


def _refusal(structured: sampling_pb2.StructuredOutput, error: str) -> FormError:
    """In words of its own: the library's name its options and inner workings."""
    if structured.HasField("tags"):
        for index, tag in enumerate(structured.tags.tags):
            if (inner := _refusal_of_tag(tag)) is not None:
                kind = tag.WhichOneof("form")
                return FormError(inner.reason, f"{FIELD}.tags.tags[{index}].{kind}", inner.sentence)
    field = _field(structured)
    line = (error.rpartition("\nerror: ")[2] if "regex parse error" in error else error).partition("\n")[0]
    if found := _KEYS.search(error):
        return FormError(Reason.UNSUPPORTED, field, f"has the keyword {found[1]}{_where(structured, found[1])}")
    if "oneOf" in error:
        sentence = f"has a oneOf{_where(structured, 'oneOf')} whose cases may overlap; use anyOf"
        return FormError(Reason.UNSUPPORTED, field, sentence)
    if "registry" in error or "Anchor" in error:
        return FormError(Reason.UNSUPPORTED, field, "has a $ref to what the document has not")
    if "Unsatisfiable" in error:
        return FormError(Reason.MALFORMED, field, f"allows no value: {line}")
    if "NoExtension" in error:
        return FormError(Reason.MALFORMED, field, "allows no output, or none that ends")
    if _TOO_COMPLEX.search(error):
        return FormError(Reason.TOO_COMPLEX, field, f"is too complex: {line}")
    if "regex parse error" in error or "invalid regex" in error:
        reason = Reason.UNSUPPORTED if _UNSUPPORTED.search(error) else Reason.MALFORMED
        return FormError(reason, field, f"has a pattern that is not taken: {line}")
    if _UNSUPPORTED.search(error):
        return FormError(Reason.UNSUPPORTED, field, f"is not taken: {line}")
    return FormError(Reason.MALFORMED, field, f"is no form: {line}")


def _refusal_of_tag(tag: sampling_pb2.Tag) -> FormError | None:
    alone = sampling_pb2.StructuredOutput()
    kind = tag.WhichOneof("form") or ""
    setattr(alone, kind, getattr(tag, kind))
    try:
        check_form(alone)
    except FormError as refusal:
        return refusal
    return None


def _where(structured: sampling_pb2.StructuredOutput, keyword: str) -> str:
    if not structured.HasField("json_schema"):
        return ""
    return f" at {place_of(json.loads(structured.json_schema), keyword)}"

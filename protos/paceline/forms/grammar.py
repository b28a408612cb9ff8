"""From a StructuredOutput as it was sent to the text that llguidance compiles. Imports no compiler."""

import json
import re
from collections.abc import Collection, Sequence
from typing import Any

from paceline.forms.errors import FormError, Reason
from paceline.forms.lark import check_lark
from paceline.forms.patterns import check_pattern, lark_regex
from paceline.forms.schemas import prepare_schema, read_schema
from paceline.v1 import sampling_pb2

MAX_TEXT_BYTES = 64 * 1024  # of a form's texts together
MAX_REGEX_BYTES = 4 * 1024
MAX_CHOICES = 1024
MAX_TAGS = 128

FIELD = "structured"
_IS_TOKEN = re.compile(r"<[^<>\[\]\s]+>")

Grammar = dict[str, Any]
"""One of llguidance's list: a JSON Schema, or Lark. The first is the whole output's, others are named in it."""


def grammar_of(structured: sampling_pb2.StructuredOutput, tokens: Collection[str] = ()) -> str:
    """Returns what to compile, with `LIMITS`. Raises FormError.

    `tokens` are what clients see of the tokenizer's added tokens. One that looks like `<this>` is no text to the
    compiler: so marks of tags may be spelled or be such a token, and others may stand in free text.
    """
    if structured.HasField("composed"):
        return structured.composed
    if structured.whitespace not in sampling_pb2.Whitespace.values():
        raise FormError(Reason.MALFORMED, f"{FIELD}.whitespace", f"is {structured.whitespace}, which means nothing")
    is_compact = structured.whitespace == sampling_pb2.WHITESPACE_COMPACT
    match structured.WhichOneof("constraint"):
        case "choice":
            grammars = [_lark(_choice(structured.choice.options))]
        case "json_object":
            if not structured.json_object:
                raise FormError(Reason.MALFORMED, f"{FIELD}.json_object", "is false; set it, or leave it unset")
            schema = prepare_schema({"type": "object"}, FIELD, is_compact=is_compact)
            grammars = [{"json_schema": schema}]
        case "tags":
            grammars = _tags(structured.tags, list(filter(_IS_TOKEN.fullmatch, tokens)), is_compact=is_compact)
        case None:
            raise FormError(Reason.MALFORMED, FIELD, "has no form; set one of json_schema, regex, grammar, choice")
        case name:
            grammars = [_form(name, getattr(structured, name), f"{FIELD}.{name}", is_compact=is_compact)]
    return json.dumps({"grammars": grammars}, separators=(",", ":"))


def _form(kind: str, text: str, field: str, *, is_compact: bool) -> Grammar:
    """`kind` is a field's name."""
    _check_size(text, field, MAX_REGEX_BYTES if kind == "regex" else MAX_TEXT_BYTES)
    match kind:
        case "json_schema":
            return {"json_schema": read_schema(text, field, is_compact=is_compact)}
        case "regex":
            check_pattern(text, field, "the pattern")
            return _lark(f"start: {lark_regex(text)}" if text else 'start: ""')
    return _lark(check_lark(text, field, is_compact=is_compact))


def _lark(text: str) -> Grammar:
    return {"lark_grammar": text}


def _check_size(text: str, field: str, max_bytes: int) -> None:
    num_bytes = len(text.encode())
    if num_bytes > max_bytes:
        raise FormError(Reason.TOO_LARGE, field, f"has {num_bytes} bytes, at most {max_bytes} are allowed")


def _check_count(count: int, field: str, at_most: int) -> None:
    if count == 0:
        raise FormError(Reason.MALFORMED, field, "is empty")
    if count > at_most:
        raise FormError(Reason.TOO_LARGE, field, f"has {count} items, at most {at_most} are allowed")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _choice(options: Sequence[str]) -> str:
    field = f"{FIELD}.choice.options"
    _check_count(len(options), field, MAX_CHOICES)
    _check_size("".join(options), field, MAX_TEXT_BYTES)
    return "start: " + " | ".join(map(_quoted, options))


def _tags(sent: sampling_pb2.Tags, tokens: Sequence[str], *, is_compact: bool) -> list[Grammar]:
    """Free text is lazy: it ends with the first mark, and each mark is one of a lexeme of its own."""
    tags, field = sent.tags, f"{FIELD}.tags.tags"
    _check_count(len(tags), field, MAX_TAGS)
    _check_size("".join(tag.begin + tag.end + _text(tag) for tag in tags), field, MAX_TEXT_BYTES)
    _check_begins([tag.begin for tag in tags], field)
    any_tag = " | ".join(f"tag_{index}" for index in range(len(tags)))
    others = " | ".join(token for token in tokens if not any(tag.begin.startswith(token) for tag in tags))
    lines = [_start(sent), r"TEXT: /(.|\n)*/", f"any_tag: {any_tag}"]
    lines.append(f"others: (TEXT ({others}))*" if others else 'others: ""')
    forms = []
    for index, tag in enumerate(tags):
        kind = tag.WhichOneof("form")
        if kind is None:
            raise FormError(Reason.MALFORMED, f"{field}[{index}]", "has no form; set json_schema, regex or grammar")
        form = _form(kind, getattr(tag, kind), f"{field}[{index}].{kind}", is_compact=is_compact)
        forms.append({"name": f"form_{index}", **form})
        lines.append(f"begin_{index}[lazy]: TEXT {_quoted(tag.begin)}")
        begin, end = _mark(tag.begin, tokens), _mark(tag.end, tokens)
        begins = f"begin_{index} | TEXT {begin}" if begin.startswith("<") else f"begin_{index}"
        lines.append(f"tag_{index}: ({begins}) @form_{index} ({_quoted(tag.end)} | {end})")
    return [_lark("\n".join(lines)), *forms]


def _start(sent: sampling_pb2.Tags) -> str:
    if sent.at_most_one:
        return f"start: others {'any_tag' if sent.required else '(any_tag | TEXT)'}"
    return f"start: (others any_tag){'+' if sent.required else '*'} others TEXT"


def _mark(text: str, tokens: Sequence[str]) -> str:
    """With the tokens in it as these, and the rest as text."""
    parts = re.split(f"({'|'.join(map(re.escape, tokens))})", text) if tokens else [text]
    return " ".join(part if index % 2 else _quoted(part) for index, part in enumerate(parts) if part) or '""'


def _text(tag: sampling_pb2.Tag) -> str:
    return tag.json_schema or tag.regex or tag.grammar


def _check_begins(begins: Sequence[str], field: str) -> None:
    """A mark with another one inside could never be reached."""
    for index, begin in enumerate(begins):
        if not begin:
            raise FormError(Reason.MALFORMED, f"{field}[{index}].begin", "is empty")
        for other, inner in enumerate(begins):
            if other != index and inner in begin:
                sentence = f"contains that of tag {other}, which comes first wherever it stands"
                raise FormError(Reason.MALFORMED, f"{field}[{index}].begin", sentence)

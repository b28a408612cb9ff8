"""A response template: how a model marks reasoning and calls of tools in its output, as transformers declares it.

JSON with `start_anchor` and `fields` (https://huggingface.co/docs/transformers/chat_response_parsing). Taken are the
fields `content`, which has no mark of its own, one for reasoning, and `tool_calls`; what is beyond that is refused by
name. Where transformers takes the first closing mark, a call whose arguments are JSON ends where the JSON does.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from paceline_scheduler.api.text.parts.patterns import Item, ItemKind, Pattern, PatternError, letters, read_pattern

MAX_TEMPLATE_CHARS = 64 * 1024
_REASONING = ("reasoning_content", "reasoning", "thinking")
_TEMPLATE_KEYS = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
_MARK_KEYS = {"open", "open_pattern", "close", "close_pattern"}
_TEXT_KEYS = _MARK_KEYS | {"content", "optional"}
_CALL_KEYS = _TEXT_KEYS | {"content_args", "repeats", "transform", "transform_each"}
_MAX_MARKS = 16  # of a place


class TemplateError(ValueError):
    """It cannot be used; the sentence names what stands in the way."""


class Body(Enum):
    """What stands between the marks of a call."""

    CALL = "a JSON object with the tool's name and its arguments"
    CALLS = "a list of these"
    ARGUMENTS = "the arguments as JSON; the name stands in the opening mark"
    PAIRS = "each argument between marks of its own; the name stands in the opening mark"


@dataclass(frozen=True, slots=True)
class CallForm:
    """`name` and `arguments` are keys of the object, or `name` a group of the opening mark."""

    opens: tuple[Pattern, ...]
    closes: tuple[Pattern, ...]  # none: the JSON's end
    body: Body
    name: str
    arguments: str = ""
    pair_open: Pattern | None = None  # of PAIRS, with the group `key`
    pair_close: Pattern | None = None
    quotes: tuple[tuple[str, str], ...] = ()  # further quotation marks of ARGUMENTS
    has_bare_keys: bool = False  # ARGUMENTS may have keys without quotation marks


@dataclass(frozen=True, slots=True)
class ResponseTemplate:
    """`anchors` end where a turn of the model begins."""

    anchors: tuple[Pattern, ...]
    skipped: tuple[Pattern, ...]  # marks around several calls, say
    reasoning_opens: tuple[Pattern, ...] = ()
    reasoning_closes: tuple[Pattern, ...] = ()
    call: CallForm | None = None


NOTHING_MARKED = ResponseTemplate((), ())


def read_template(source: str | Mapping[str, Any]) -> ResponseTemplate:
    """Of JSON. Raises TemplateError."""
    if isinstance(source, str) and len(source) > MAX_TEMPLATE_CHARS:
        raise TemplateError(f"it has {len(source)} characters, at most {MAX_TEMPLATE_CHARS} are taken")
    try:
        template = json.loads(source) if isinstance(source, str) else source
        return _read(template)
    except PatternError as error:
        raise TemplateError(str(error)) from error
    except (ValueError, RecursionError) as error:
        raise error if isinstance(error, TemplateError) else TemplateError(f"it is no JSON: {error}") from error


def _read(template: object) -> ResponseTemplate:
    if not isinstance(template, dict) or not isinstance(template.get("fields"), dict):
        raise TemplateError("it is no object with fields")
    _check_keys("it", template, _TEMPLATE_KEYS)
    if template.get("version", 1) != 1:
        raise TemplateError(f"its version is {template['version']!r}, must be 1")
    fields = template["fields"]
    _check_keys("fields", fields, {"content", "tool_calls", *_REASONING})
    anchors = _marks("start_anchor", template, "start_anchor")
    if not anchors:
        raise TemplateError("it has no start_anchor")
    content = _checked("content", fields.get("content", {}), _TEXT_KEYS, "text")
    if _marks("content", content, "open"):
        raise TemplateError("content has an opening mark, must be what no other field marks")
    named = [name for name in _REASONING if name in fields]
    if len(named) > 1:
        raise TemplateError(f"{' and '.join(named)} are both reasoning, one field can be")
    reasoning = _checked(named[0], fields[named[0]], _TEXT_KEYS, "text") if named else {}
    opens, closes = (_marks("reasoning", reasoning, end) for end in ("open", "close"))
    if bool(opens) != bool(closes):
        raise TemplateError(f"{named[0]} needs an opening and a closing mark")
    call = _call(fields["tool_calls"]) if "tool_calls" in fields else None
    return ResponseTemplate(anchors, _marks("content", content, "close"), opens, closes, call)


def _call(field: object) -> CallForm:
    read = _checked("tool_calls", field, _CALL_KEYS, "json", "xml-inline")
    opens, closes = (_marks("tool_calls", read, end) for end in ("open", "close"))
    if not opens:
        raise TemplateError("tool_calls has no opening mark")
    if read.get("repeats", False) is not (not read.get("transform_each", False)):
        raise TemplateError("tool_calls is no list: needs one of repeats and transform_each")
    body, name, arguments = _body_of(read)
    pairs: tuple[Pattern | None, Pattern | None] = None, None
    args = read.get("content_args", {})
    if read["content"] == "xml-inline":
        _check_keys("tool_calls.content_args", args, {"tag_pattern"})
        pairs = _pair(args.get("tag_pattern"))
        if body is not Body.ARGUMENTS:
            raise TemplateError("tool_calls: arguments in marks of their own need the name in the opening mark")
        body = Body.PAIRS
    else:
        _check_keys("tool_calls.content_args", args, {"string_delims", "unquoted_keys"})
        if args and body is not Body.ARGUMENTS:
            raise TemplateError("tool_calls.content_args: only arguments alone may be in JSON of another kind")
    if body in (Body.ARGUMENTS, Body.PAIRS):
        if any(name not in pattern.groups for pattern in opens):
            raise TemplateError(f"tool_calls: the opening mark has no group {name!r}")
        if body is Body.PAIRS and not closes:
            raise TemplateError("tool_calls has no closing mark")
    pair_open, pair_close = pairs
    quotes = tuple((str(begin), str(end)) for begin, end in args.get("string_delims", ()))
    return CallForm(
        opens, closes, body, name, arguments, pair_open, pair_close, quotes, bool(args.get("unquoted_keys"))
    )


def _body_of(field: Mapping[str, Any]) -> tuple[Body, str, str]:
    """By its `transform`, which makes transformers' message of it."""
    each = bool(field.get("transform_each"))
    transform = field.get("transform", {"function": "{content}"})
    _check_keys("tool_calls.transform", transform, {"type", "function", "id"})
    function = transform.get("function")
    if isinstance(function, str) and function == "{content}" and not each:
        return Body.CALL, "name", "arguments"
    if isinstance(function, dict) and set(function) == {"name", "arguments"}:
        name, arguments = (str(function[key]) for key in ("name", "arguments"))
        if each and _is_placeholder(name) and _is_placeholder(arguments):
            return Body.CALLS, name[1:-1], arguments[1:-1]
        if name.startswith("{content.") and arguments.startswith("{content."):
            return Body.CALL, name[len("{content.") : -1], arguments[len("{content.") : -1]
        if arguments == "{content}" and _is_placeholder(name):
            return Body.ARGUMENTS, name[1:-1], ""
    raise TemplateError("tool_calls.transform does not say where a call's name and its arguments stand")


def _is_placeholder(text: str) -> bool:
    return text[:1] == "{" and text[-1:] == "}" and text[1:-1].isidentifier()


def _pair(source: object) -> tuple[Pattern, Pattern]:
    """Of `tag_pattern`: what opens an argument, and what closes it."""
    if not isinstance(source, str):
        raise TemplateError("tool_calls.content_args has no tag_pattern")
    items = read_pattern(source).items
    at = next((index for index, item in enumerate(items) if item.group == "value"), None)
    if at is None or items[at].kind is not ItemKind.ANYTHING or "key" not in Pattern(items[:at]).groups:
        raise TemplateError(f"tag_pattern {source!r} has no group key before a group value of .*?")
    behind = items[at + 1 :]
    if len(behind) != 1 or items[at - 1].kind is not ItemKind.LETTERS:
        raise TemplateError(f"tag_pattern {source!r} has no letters on both sides of the value")
    return Pattern(items[:at]), Pattern((Item(ItemKind.LETTERS, behind[0].letters),))


def _checked(name: str, field: object, keys: set[str], *contents: str) -> dict[str, Any]:
    if not isinstance(field, dict):
        raise TemplateError(f"{name} is no object")
    _check_keys(name, field, keys)
    content = field.get("content", "text")
    if content not in contents:
        raise TemplateError(f"{name}.content is {content!r}, must be {' or '.join(contents)}")
    if field.get("optional", True) is not True:
        raise TemplateError(f"{name}.optional must be true")
    return {**field, "content": content}


def _check_keys(name: str, value: object, known: set[str]) -> None:
    if not isinstance(value, dict):
        raise TemplateError(f"{name} is no object")
    if unknown := sorted(set(value) - known):
        raise TemplateError(f"{name} has {unknown[0]!r}, which this version does not know")


def _marks(name: str, field: Mapping[str, Any], key: str) -> tuple[Pattern, ...]:
    pattern, literal = field.get(f"{key}_pattern"), field.get(key)
    if pattern is not None:
        if literal is not None or not isinstance(pattern, str):
            raise TemplateError(f"{name}.{key} must be letters or a pattern")
        return (read_pattern(pattern),)
    texts: Iterable[object] = literal if isinstance(literal, list) else () if literal is None else (literal,)
    texts = tuple(texts)
    if len(texts) > _MAX_MARKS or not all(isinstance(text, str) for text in texts):
        raise TemplateError(f"{name}.{key} must be text, or at most {_MAX_MARKS} of them")
    return tuple(letters(str(text)) for text in texts)

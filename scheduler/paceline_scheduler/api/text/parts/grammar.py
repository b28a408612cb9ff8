"""The grammar of a whole output: reasoning, calls of tools as the model's family writes them, an answer in a form.

One grammar from the first token to the last, so there is no moment at which it is switched on. Marks that are tokens of
their own stand in it by their ids: the same letters are no marks.
"""

import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.forms.grammar import Grammar
from paceline.forms.schemas import prepare_schema
from paceline_scheduler.api.text.parts.bound import BoundCall, BoundTemplate
from paceline_scheduler.api.text.parts.json_schemas import properties_of, schema_types
from paceline_scheduler.api.text.parts.patterns import Item, ItemKind, Pattern
from paceline_scheduler.api.text.parts.style import CallStyle, PairStyle, Slot
from paceline_scheduler.api.text.parts.template import Body

_ANNOTATIONS = {"$schema", "$id", "title", "description", "default", "examples", "$comment", "deprecated"}
_HELD_KEYWORDS = _ANNOTATIONS | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_HELD_IN_TEXT = _ANNOTATIONS | {"type", "enum", "const", "nullable"}
_ID = "/[a-zA-Z0-9]{9}/"
_MARK_TOKENS = re.compile("([\ud800-\udbff])")


@dataclass(frozen=True, slots=True)
class ToolForm:
    """`schema` is a JSON Schema document that the arguments are valid against; of a family that writes no JSON and no
    single arguments they are any object.
    """

    name: str
    schema: str


@dataclass(frozen=True, slots=True)
class CallsForm:
    """`is_required`: the output is calls, and nothing else but reasoning. `is_parallel`: several may be made."""

    tools: Sequence[ToolForm]
    style: CallStyle
    is_required: bool
    is_parallel: bool


def write_grammar(
    template: BoundTemplate, calls: CallsForm | None, answer: Sequence[Grammar], *, is_reasoning: bool
) -> str:
    """What llguidance compiles. `answer` is the form of an output without calls, as its grammars; none: text.
    `is_reasoning`: the prompt has opened the reasoning.
    """
    writer = _GrammarWriter(template)
    reasoning = writer.reasoning(is_open=is_reasoning)
    body = "" if calls is None else writer.calls(calls)
    if answer:
        first, *others = answer
        writer.forms += [{**first, "name": "answer"}, *others]
    if calls is None:
        body = "@answer"
    elif not calls.is_required:
        begin = calls.style.begin
        body = f"({writer.literal(begin)} {body} | @answer)" if answer else writer.behind_text(begin, body)
    else:
        body = f"{writer.literal(calls.style.begin)} {body}"
    lines = [f"start: {reasoning} {body}", *writer.lines]
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}, *writer.forms]}, separators=(",", ":"))


def unheld_keyword(template: BoundTemplate, schema: str) -> str:
    """What of the schema of a tool's arguments a grammar leaves out; empty: nothing."""
    call = template.call
    assert call is not None, "there are calls"
    if call.quotes or call.form.has_bare_keys:
        return "a schema"
    if call.form.body is not Body.PAIRS:
        return ""
    document, properties = json.loads(schema), properties_of(schema)
    values = [value for value in properties.values() if _is_bare_text(value)]
    unheld = [*(document.keys() - _HELD_KEYWORDS), *(key for value in values for key in _unheld_in_text(value))]
    missing = set(document.get("required", ())) - properties.keys()
    return next(iter(sorted(unheld)), "required" if missing else "")


def _is_bare_text(value: Any) -> bool:  # noqa: ANN401 (JSON)
    types = schema_types(value)
    return not types or "string" in types


def _unheld_in_text(value: Any) -> Collection[str]:  # noqa: ANN401 (JSON)
    if not isinstance(value, dict):
        return () if value is True else ("false",)
    texts = (*value.get("enum", ()), *([value["const"]] if "const" in value else ()))
    return value.keys() - _HELD_IN_TEXT | {"enum" for text in texts if not isinstance(text, str)}


class _GrammarWriter:
    def __init__(self, template: BoundTemplate) -> None:
        self._template = template
        self._token_ids = {mark: token_id for token_id, mark in template.alphabet.by_token.items()}
        self.lines = [r"TEXT: /(.|\n)*/", r"BREAK: /[ \n]{0,4}/"]
        self.forms: list[Grammar] = []

    def reasoning(self, *, is_open: bool) -> str:
        opens = _letters_of(self._template.reasoning_opens)
        closes = _letters_of(self._template.reasoning_closes.patterns)
        if not (opens and closes):
            return ""
        free = f"{self._up_to(closes[0])} BREAK"
        return free if is_open else f"({self.literal(opens[0])} {free})?"

    def calls(self, calls: CallsForm) -> str:
        """Behind the text before the first call's first slot."""
        style = calls.style
        for index, tool in enumerate(calls.tools):
            name = f"call_{index}"
            slots = {Slot.NAME: _quoted(tool.name), Slot.ID: _ID}
            slots[Slot.ARGUMENTS] = self._arguments(f"arguments_{index}", tool, style.pairs)
            parts = (slots[piece] if isinstance(piece, Slot) else self.literal(piece) for piece in style.call)
            self.lines.append(f"{name}: {' '.join(parts)}")
        self.lines.append("call: " + " | ".join(f"call_{index}" for index in range(len(calls.tools))))
        more = "" if style.between is None or not calls.is_parallel else f"({self.literal(style.between)} call)*"
        return f"call {more} {self.literal(style.end)}"

    def behind_text(self, begin: str, calls: str) -> str:
        """Free text, behind which calls may stand."""
        call = self._template.call
        assert call is not None, "there are calls"
        firsts = [pattern.items[0].letters for pattern in (*self._template.skipped, *call.opens)]
        mark = max((first for first in firsts if begin.startswith(first)), key=len, default="")
        if not mark:  # the call is the turn
            return rf'({self.literal(begin)} {calls} | /\s*[^{{\s](.|\n)*/ | "")'
        behind = f"{self.literal(begin[len(mark) :])} {calls}"
        # As one with its mark the text ends there; alone it would go on over it.
        return f"({self._up_to(mark)} {behind} | TEXT)"

    def _up_to(self, mark: str) -> str:
        """Free text, and the mark that ends it."""
        if mark[0] in self._token_ids:
            return f"TEXT {self.literal(mark)}"
        name = f"up_to_{len(self.lines)}"
        self.lines.append(f"{name}[lazy]: TEXT {self.literal(mark)}")
        return name

    def _arguments(self, name: str, tool: ToolForm, pairs: PairStyle | None) -> str:
        call = self._template.call
        assert call is not None, "there are calls"
        if pairs is not None:
            return self._pairs(name, tool, pairs)
        if call.quotes or call.form.has_bare_keys:
            return self._lax_object(call)
        return self._json(name, json.loads(tool.schema))

    def _json(self, name: str, schema: Any) -> str:  # noqa: ANN401 (JSON)
        self.forms.append({"name": name, "json_schema": prepare_schema(schema, "", is_compact=False)})
        return f"@{name}"

    def _pairs(self, name: str, tool: ToolForm, style: PairStyle) -> str:
        """Each argument once, in the order of the schema. A rule says what follows behind none, another behind some."""
        schema = json.loads(tool.schema)
        arguments, required = list(properties_of(tool.schema).items()), schema.get("required", ())
        for index, (key, value) in enumerate(arguments):
            pair, none, some = (f"{name}_{kind}_{index}" for kind in ("pair", "none", "some"))
            next_none, next_some = (f"{name}_{kind}_{index + 1}" for kind in ("none", "some"))
            before = f"{self.literal(style.before_key)} {_quoted(key)} {self.literal(style.before_value)}"
            self.lines.append(f"{pair}: {before} {self._value(f'{name}_{index}', value, schema, style.after_value)}")
            is_optional = key not in required
            self.lines.append(f"{none}: {pair} {next_some}" + f" | {next_none}" * is_optional)
            self.lines.append(
                f"{some}: {self.literal(style.between)} {pair} {next_some}" + f" | {next_some}" * is_optional
            )
        self.lines += [f'{name}_none_{len(arguments)}: ""', f'{name}_some_{len(arguments)}: ""']
        return f"{name}_none_0"

    def _value(self, name: str, value: Any, schema: Any, close: str) -> str:  # noqa: ANN401 (JSON)
        """With what closes it. Text is bare."""
        if not _is_bare_text(value):
            definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
            return f"{self._json(name, {**value, **definitions})} {self.literal(close)}"
        texts = value.get("enum", [value["const"]] if "const" in value else ()) if isinstance(value, dict) else ()
        if texts and all(isinstance(text, str) for text in texts):
            return f"({' | '.join(map(_quoted, texts))}) {self.literal(close)}"
        return self._up_to(close)

    def _lax_object(self, call: BoundCall) -> str:
        """Any of bare keys and of texts in the family's own quotation marks."""
        if not any(line.startswith("lax_") for line in self.lines):
            begin, end = call.quotes[0] if call.quotes else ('"', '"')
            values = r"/-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,15})?/ | /true|false|null/ | lax_object | lax_list"
            self.lines += [
                f"lax_value: {self.literal(begin)} {self._up_to(end)} | {values}",
                'lax_list: "[" (lax_value ("," lax_value)*)? "]"',
                r'lax_object: "{" (/[a-zA-Z0-9_]{1,64}:/ lax_value ("," /[a-zA-Z0-9_]{1,64}:/ lax_value)*)? "}"',
            ]
        return "lax_object"

    def literal(self, text: str) -> str:
        """Of the template's alphabet."""
        pieces = filter(None, _MARK_TOKENS.split(text))
        return " ".join(f"<[{self._token_ids[p]}]>" if p in self._token_ids else _quoted(p) for p in pieces) or '""'


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _letters_of(patterns: Iterable[Pattern]) -> list[str]:
    """Of those that are letters alone."""
    firsts = [pattern.items[0] for pattern in patterns if len(pattern.items) == 1]
    return [item.letters for item in firsts if item == Item(ItemKind.LETTERS, item.letters)]

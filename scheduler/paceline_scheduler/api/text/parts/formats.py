"""The format of each model's outputs, and whether its own chat template writes calls that the format reads.

A template that writes something else would make calls that nobody finds: the model then takes no tools, and a line in
the log has both texts. Tried once per template, in the process that renders its chats.
"""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import structlog

from paceline_scheduler.api.text.detokenizer import Spelling
from paceline_scheduler.api.text.parts.bound import BoundTemplate, OutputFormat
from paceline_scheduler.api.text.parts.cutter import PartCutter, Wanted
from paceline_scheduler.api.text.parts.part import Part, PartKind
from paceline_scheduler.api.text.parts.style import EXAMPLES, CallStyle, StyleError, read_style
from paceline_scheduler.api.text.parts.table import TableEntry, chosen, named, own
from paceline_scheduler.api.text.parts.template import TemplateError
from paceline_scheduler.backend import TokenizerSource
from paceline_scheduler.errors import InvalidRequestError, UnsupportedError

Render = Callable[[Sequence[Mapping[str, Any]], Mapping[str, Any]], Awaitable[str]]
"""Takes messages and variables of a model's chat template; raises InvalidRequestError and QueueFullError."""

_MAX_MODELS = 16
_TOOL = "look_up"
_SCHEMA = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "description": "Where."},
        "number": {"type": "integer", "description": "How many."},
    },
    "required": ["place"],
}
_TOOLS = [{"type": "function", "function": {"name": _TOOL, "description": "It looks.", "parameters": _SCHEMA}}]
_ARGUMENTS = ({"place": 'Zürich "12"', "number": 3}, {"place": "a, {b}"})
_TOOLS_FIELD = "chat.tools"
_REFUSED = "chat.messages"  # by the template's own words, where it fails the field is the chat

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PartsSupport:
    """`why_no_tools` is a sentence; empty: calls of tools can be made and are read. What is not final is tried again: a
    busy machine may have kept the template from rendering in time.
    """

    why_no_tools: str
    has_reasoning: bool
    is_final: bool = True
    style: CallStyle | None = None
    """None: no grammar can ask for calls."""


NO_PARTS = PartsSupport("it could not be tried", has_reasoning=False)


class OutputFormats:
    """Of the models that were used last."""

    def __init__(self) -> None:
        self._entries: dict[str, TableEntry] = {}  # by the tokenizer's digest
        self._formats: dict[tuple[str, str], OutputFormat] = {}  # by digest and name
        self._trials: dict[str, asyncio.Task[PartsSupport]] = {}

    def name(self, source: TokenizerSource) -> str:
        """Of the format that new requests to the model get."""
        return self._entry(source).name

    def format(self, source: TokenizerSource, spelling: Spelling, name: str) -> OutputFormat:
        """Raises UnsupportedError for a format of another release."""
        key = source.digest, name
        if key not in self._formats:
            current = self._entry(source)
            entry = current if current.name == name else named(name)
            if entry is None:
                sentence = f"the request was begun with the output format {name!r}, which this release does not have"
                raise UnsupportedError("output.parts", f"{sentence}; send it anew under another request_id")
            template = BoundTemplate(entry.template, spelling.added, is_whole_turn=entry.is_whole_turn)
            _put(self._formats, key, OutputFormat(entry.name, template))
        return self._formats[key]

    async def support(self, source: TokenizerSource, spelling: Spelling, render: Render) -> PartsSupport:
        """Raises QueueFullError."""
        trial = self._trials.get(source.digest)
        if trial is None or (trial.done() and not _is_final(trial)):
            output_format = self.format(source, spelling, self.name(source))
            ends = [spelling.token_bytes[token_id].decode("utf-8", "replace") for token_id in source.end_token_ids]
            is_told = trial is not None and not trial.cancelled() and trial.exception() is None
            trial = asyncio.ensure_future(_support(source, output_format, render, tuple(filter(None, ends)), is_told))
            _put(self._trials, source.digest, trial)
        return await asyncio.shield(trial)

    async def close(self) -> None:
        for trial in self._trials.values():
            trial.cancel()
        await asyncio.gather(*self._trials.values(), return_exceptions=True)

    def _entry(self, source: TokenizerSource) -> TableEntry:
        entry = self._entries.get(source.digest)
        if entry is None:
            entry = chosen(source.template_for(has_tools=True))
            if source.response_template is not None:
                try:
                    entry = own(source.response_template)
                except TemplateError as error:
                    _log.warning("response_template_refused", tokenizer=source.digest, why=str(error), used=entry.name)
            _put(self._entries, source.digest, entry)
        return entry


def _is_final(trial: "asyncio.Task[PartsSupport]") -> bool:
    return not trial.cancelled() and trial.exception() is None and trial.result().is_final


def _put(cache: dict[Any, Any], key: object, value: object) -> None:
    cache[key] = value
    while len(cache) > _MAX_MODELS:
        del cache[next(iter(cache))]


async def _support(
    source: TokenizerSource, output_format: OutputFormat, render: Render, ends: tuple[str, ...], is_told: bool
) -> PartsSupport:
    """`is_told`: the log has it already, if tools are not available."""
    if not output_format.has_calls or source.template_for(has_tools=True) is None:
        return PartsSupport("no marks of calls are known for its chat template", output_format.has_reasoning)
    one, two = [await _why_not(output_format, render, ends, num_calls) for num_calls in (1, 2)]
    wrong = one if one.sentence or two.outcome is _Outcome.REFUSED else two
    if wrong.sentence and not is_told:
        about = {"tokenizer": source.digest, "format": output_format.name, "why": wrong.sentence}
        _log.warning("tools_unavailable", **about, rendered=wrong.rendered, read=wrong.read)
    style, is_final = None, wrong.outcome is not _Outcome.FAILED
    if not wrong.sentence:
        try:
            style = await _style(output_format, render, ends)
        except InvalidRequestError:
            is_final = False
    return PartsSupport(wrong.sentence, output_format.has_reasoning, is_final, style)


async def _style(output_format: OutputFormat, render: Render, ends: tuple[str, ...]) -> CallStyle | None:
    """Raises InvalidRequestError for what was not rendered."""
    turns: list[str | None] = []
    for examples in (EXAMPLES[:1], EXAMPLES):
        calls, tools = [example.call for example in examples], [example.tool for example in EXAMPLES]
        try:
            _, turn = await _turn(output_format, render, ends, calls, tools)
        except InvalidRequestError as error:
            if error.field != _REFUSED:
                raise
            turn = None  # several calls are too many
        turns.append(turn)
    one, both = turns
    with contextlib.suppress(StyleError):
        return None if one is None else read_style(output_format.template, one, both)
    return None


class _Outcome(Enum):
    RENDERED = "rendered"
    REFUSED = "the template says why"
    FAILED = "it was not rendered, which may be a matter of time"


@dataclass(frozen=True, slots=True)
class _Trial:
    sentence: str = ""
    outcome: _Outcome = _Outcome.RENDERED
    rendered: str = ""
    read: str = ""


async def _why_not(output_format: OutputFormat, render: Render, ends: tuple[str, ...], num_calls: int) -> _Trial:
    expected = [{"name": _TOOL, "arguments": each} for each in _ARGUMENTS[:num_calls]]
    calls = [
        {"type": "function", "id": f"trialcal{number}", "function": function}
        for number, function in enumerate(expected)
    ]
    try:
        begin, turn = await _turn(output_format, render, ends, calls, _TOOLS)
    except InvalidRequestError as error:
        if error.field == _TOOLS_FIELD:
            return _Trial("its chat template does not show tools", _Outcome.REFUSED)
        return _Trial(error.message, _Outcome.REFUSED if error.field == _REFUSED else _Outcome.FAILED)
    cutter = PartCutter(output_format, Wanted("", 0, {_TOOL: json.dumps(_SCHEMA)}))
    cutter.add(turn)
    cutter.finish()
    read = _read(cutter.taken())
    if begin and read == expected:
        return _Trial()
    shown = output_format.template.alphabet.spell(turn)
    why = f"its chat template writes a call as {shown[:200]!r}, which is not read as one"
    return _Trial(why, rendered=shown, read=str(read))


async def _turn(
    output_format: OutputFormat,
    render: Render,
    ends: tuple[str, ...],
    calls: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
) -> tuple[int, str]:
    """A turn with these calls. Returns what stands behind the last beginning of a turn, up to a token that ends it, in
    the template's alphabet, and where it begins; 0: nothing begins one.
    """
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    variables = {"tools": tools, "add_generation_prompt": False}
    rendered = await render([{"role": "user", "content": "?"}, answer], variables)
    template = output_format.template
    text = template.alphabet.write(rendered)
    begin = position = 0
    while (found := template.anchors.search(text, position, is_end=True)[1]) is not None:
        begin = position = found.end
    turn = text[begin:]
    for end in ends:
        turn = turn.partition(template.alphabet.write(end))[0]
    return begin, turn


def _read(parts: Sequence[Part]) -> list[object]:
    """Calls as they were expected, and what else there is as it is."""
    read: list[object] = [{"text": part.text} for part in parts if part.kind is not PartKind.CALL]
    for call in (part for part in parts if part.id):
        arguments = "".join(part.text for part in parts if part.kind is PartKind.CALL and part.index == call.index)
        try:
            read.append({"name": call.name, "arguments": json.loads(arguments)})
        except ValueError:
            read.append({"name": call.name, "arguments": arguments})
    return read

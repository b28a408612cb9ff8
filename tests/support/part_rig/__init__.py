"""Outputs cut into parts: a vocabulary of bytes and marks, chat templates of real models, turns rendered by them."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from paceline.chat_template import ChatTemplate
from paceline_scheduler.api.text.detokenizer import Detokenizer, Spelling
from paceline_scheduler.api.text.parts.bound import BoundTemplate, OutputFormat
from paceline_scheduler.api.text.parts.cutter import PartCutter, Wanted
from paceline_scheduler.api.text.parts.part import Part, PartKind, append_parts
from paceline_scheduler.api.text.parts.table import TableEntry, chosen

CHAT_TEMPLATES = {path.stem: path.read_text() for path in (Path(__file__).parent / "chat_templates").glob("*.jinja")}
_NOON = datetime(2026, 11, 29, 12, 0)  # noqa: DTZ001 (templates are told the local time)
_CONSTANTS = {"bos_token": "<s>", "eos_token": "</s>"}
# What ends a turn; no output has it.
_ENDS = re.compile(
    r"<\|im_end\|>|<\|eot_id\|>|<\|end_of_text\|>|</s>|<\uff5cend\u2581of\u2581sentence|<turn\|>|<\|tool_response>"
)

Call = tuple[str, Mapping[str, Any]]
"""The tool's name and its arguments."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A token for each byte, and behind them one for each mark; the last `num_special` are special."""

    marks: tuple[str, ...] = ()
    num_special: int = 0

    @cache  # noqa: B019  there are few
    def spelling(self) -> Spelling:
        spelt = [bytes([byte]) for byte in range(256)] + [mark.encode() for mark in self.marks]
        num_shown = len(spelt) - self.num_special
        without = (*spelt[:num_shown], *(b"" for _ in range(self.num_special)))
        added = frozenset(range(256, len(spelt)))
        return Spelling(tuple(spelt), without, 0, added)

    def encode(self, text: str) -> list[int]:
        """As the tokenizers library finds added tokens: before all else."""
        pieces = re.split("(" + "|".join(map(re.escape, self.marks)) + ")", text) if self.marks else [text]
        token_ids: list[int] = []
        for piece in pieces:
            token_ids += [256 + self.marks.index(piece)] if piece in self.marks else piece.encode()
        return token_ids


@dataclass(frozen=True, slots=True)
class Cut:
    """`calls` are names and arguments as they came, `pieces` what each token added."""

    text: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    ids: tuple[str, ...]
    pieces: tuple[tuple[Part, ...], ...]
    num_reasoning_tokens: int


@cache
def output_format(entry: TableEntry, vocabulary: Vocabulary) -> OutputFormat:
    """What a model with these tokens is cut by."""
    added = vocabulary.spelling().added
    return OutputFormat(entry.name, BoundTemplate(entry.template, added, is_whole_turn=entry.is_whole_turn))


@cache
def chat_template(model: str) -> ChatTemplate:
    """Compiled."""
    return ChatTemplate(CHAT_TEMPLATES[model], _CONSTANTS)


def cut(
    entry: TableEntry,
    output: str | Sequence[int],
    *,
    prompt: str = "",
    vocabulary: Vocabulary | None = None,
    tools: Mapping[str, str] | None = None,
    takes_calls: bool = True,
    is_finished: bool = True,
) -> Cut:
    """The output of a model, as text or tokens, token by token."""
    vocabulary = vocabulary or Vocabulary()
    spelling = vocabulary.spelling()
    cutter = PartCutter(output_format(entry, vocabulary), Wanted("r1", 0, tools or {}, takes_calls))
    cutter.begin(np.array(vocabulary.encode(prompt), dtype=np.int32), spelling)
    detokenizer, pieces = Detokenizer(spelling, skip_special_tokens=True, before=[0]), []
    for token_id in vocabulary.encode(output) if isinstance(output, str) else output:
        cutter.take(token_id, detokenizer.take([token_id]))
        pieces.append(cutter.taken())
    if is_finished:
        cutter.finish()
        pieces.append(cutter.taken())
    return gathered(pieces, cutter.num_reasoning_tokens)


def gathered(pieces: Iterable[Iterable[Part]], num_reasoning_tokens: int = 0) -> Cut:
    """All that was said."""
    said = tuple(tuple(parts) for parts in pieces)
    whole: list[Part] = []
    for parts in said:
        append_parts(whole, [Part(part.kind, part.text, part.index, part.id, part.name) for part in parts])
    calls = [part for part in whole if part.kind is PartKind.CALL]
    named = [part for part in calls if part.id]
    assert [part.index for part in named] == list(range(len(named))), "calls are numbered, and named once"
    arguments = ["".join(part.text for part in calls if part.index == index) for index in range(len(named))]
    return Cut(
        text="".join(part.text for part in whole if part.kind is PartKind.TEXT),
        reasoning="".join(part.text for part in whole if part.kind is PartKind.REASONING),
        calls=tuple((part.name, text) for part, text in zip(named, arguments, strict=True)),
        ids=tuple(part.id for part in named),
        pieces=said,
        num_reasoning_tokens=num_reasoning_tokens,
    )


def tool(name: str, properties: Mapping[str, Any]) -> dict[str, Any]:
    """As chat templates get it."""
    parameters = {"type": "object", "properties": dict(properties), "required": []}
    return {"type": "function", "function": {"name": name, "description": "It is.", "parameters": parameters}}


def render(
    model: str,
    tools: Sequence[dict[str, Any]],
    calls: Sequence[Call] = (),
    *,
    content: str = "",
    reasoning: str = "",
) -> str:
    """The turn in which the model answers so, as its chat template has it."""
    functions = [{"name": name, "arguments": dict(arguments)} for name, arguments in calls]
    nothing = None if "content'] is not none -" in CHAT_TEMPLATES[model] else ""
    turn: dict[str, Any] = {"role": "assistant", "content": content or nothing}
    turn["tool_calls"] = [
        {"type": "function", "id": f"abcdefg{index:02}", "function": function}
        for index, function in enumerate(functions)
    ]
    if reasoning:
        turn["reasoning_content"] = reasoning
    reads_tools = "tools" in CHAT_TEMPLATES[model].replace("tool_calls", "")
    variables = {"tools": list(tools) if reads_tools else None, "add_generation_prompt": False}
    whole = chat_template(model).render([{"role": "user", "content": "hi"}, turn], _NOON, 1 << 20, variables)
    anchors = output_format(chosen(CHAT_TEMPLATES[model]), Vocabulary()).template.anchors
    end = position = 0
    while (found := anchors.search(whole, position, is_end=True)[1]) is not None:
        end = position = found.end
    return _ENDS.split(whole[end:])[0]

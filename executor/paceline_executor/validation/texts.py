"""What is predicted: texts or chats out of a file, and English prose that every Python brings along, in windows.

Knows files and tokenizers. Refuses to know models.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from textwrap import dedent

from tokenizers import Tokenizer

from paceline.chat_template import ChatRefusedError, ChatTemplate, TemplateFailedError
from paceline.process.small_files import read_small_file
from paceline_executor.errors import ProbeTextError
from paceline_executor.weights import TokenizerBundle

# The first tokens of a window are given, not predicted: with so little before them they would measure chance.
NUM_GIVEN = 16
MAX_ANSWERS = 8
_MAX_FILE_BYTES = 64 << 20
_CHARS_PER_TOKEN = 32  # what lies further behind is not looked at: encoding takes time
_EXAMPLE = '{"text": "…"} or {"messages": [{"role": "user", "content": "…"}]}'

Window = tuple[int, ...]
"""Tokens that are read together, so many at most."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A text, or the messages of a chat. where: for people."""

    where: str
    text: str | None
    messages: tuple[dict[str, str], ...] = ()


def prose() -> list[Probe]:
    """The paragraphs of Python's language reference, each once, in the order of its topics' names.

    Grammar, code, headings and lists are left out: a paragraph begins with a capital letter, its lines are indented
    alike, and it ends with a full stop. The text changes a little with Python's version.
    """
    found = (dedent(part.strip("\n")) for name in sorted(topics) for part in re.split(r"\n\s*\n", topics[name]))
    paragraphs = dict.fromkeys(" ".join(each.split()) for each in found if _is_prose(each))
    return [Probe("the prose", "\n\n".join(paragraphs))]


def read_probes(path: Path) -> list[Probe]:
    """A text; or where the first character is {, JSON lines. Raises ProbeTextError."""
    try:
        text = read_small_file(path, _MAX_FILE_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ProbeTextError(f"{path} is not UTF-8 at byte {error.start}: convert it") from None
    except OSError as error:
        raise ProbeTextError(f"cannot read {path}: {error.strerror or error}") from None
    if not text.lstrip().startswith("{"):
        return [Probe(str(path), text)]
    lines = enumerate(text.split("\n"), 1)
    return [_probe(f"line {number} of {path}", line) for number, line in lines if line.strip()]


def windows(probes: Sequence[Probe], bundle: TokenizerBundle, size: int, most: int, now: datetime) -> list[Window]:
    """Their first tokens, so many at most, in order, none twice; no window has tokens of two probes.

    size: of a window, whose first tokens are what the model wants in front of a text. now: what chat templates may
    show. Raises ProbeTextError.
    """
    tokenizer = Tokenizer.from_str(bundle.tokenizer_json.decode())
    found: list[Window] = []
    for probe in probes:
        text, first = (
            (_rendered(probe, bundle, now), ()) if probe.text is None else (probe.text, bundle.prefix_token_ids)
        )
        ids = tokenizer.encode(text[: most * _CHARS_PER_TOKEN], add_special_tokens=False).ids[:most]
        step = size - len(first)
        found += [(*first, *ids[start : start + step]) for start in range(0, len(ids), step)]
        most -= len(ids)
        if most <= 0:
            break
    return found


def _probe(where: str, line: str) -> Probe:
    try:
        fields = json.loads(line)
        if "text" in fields:
            return Probe(where, _checked(fields["text"]))
        messages = [{name: _checked(each[name]) for name in ("role", "content")} for each in fields["messages"]]
        return Probe(where, None, tuple(messages))
    except (ValueError, RecursionError, TypeError, KeyError):
        raise ProbeTextError(f"{where} is not JSON such as {_EXAMPLE}") from None


def _checked(text: object) -> str:
    if not isinstance(text, str):
        raise TypeError
    text.encode()  # raises a ValueError for half a surrogate pair
    return text


def _rendered(probe: Probe, bundle: TokenizerBundle, now: datetime) -> str:
    if bundle.chat_template is None:
        raise ProbeTextError(f"{probe.where} has messages, and the model has no chat template: give texts")
    try:
        template = _template(bundle.chat_template, bundle.special_tokens)
        return template.render(list(probe.messages), now, _MAX_FILE_BYTES)
    except (ChatRefusedError, TemplateFailedError) as error:
        raise ProbeTextError(f"{probe.where}: the model's chat template says: {error}") from None


@cache
def _template(source: str, constants: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(constants))


def _is_prose(paragraph: str) -> bool:
    return paragraph[:1].isupper() and "\n " not in paragraph and paragraph.rstrip().endswith(".")

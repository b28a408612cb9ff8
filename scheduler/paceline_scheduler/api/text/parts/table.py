"""Which models have a response template here, known by marks in their chat templates, and the names of formats.

Each file of `response_templates` has `marks`, all of which stand in a model's chat template, and the response template
in transformers' form; the file with the most marks is the one. Where `is_whole_turn` is set, a call may be the whole
turn, without a mark. A change that may cut any output differently is a file with another version; the older one stays
for requests that were begun with it, until no release that begins them is in use.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

from paceline_scheduler.api.text.parts.template import NOTHING_MARKED, ResponseTemplate, read_template

TEXT_ALONE = "text@1"
"""The format of a model whose marks are not known: all is text."""
_OWN = "checkpoint"
_OWN_FORM = 1  # raised when templates of checkpoints come to be read in another way


@dataclass(frozen=True, slots=True)
class TableEntry:
    """`name` has the version."""

    name: str
    marks: tuple[str, ...]
    is_whole_turn: bool
    template: ResponseTemplate


NO_ENTRY = TableEntry(TEXT_ALONE, (), False, NOTHING_MARKED)


@lru_cache(maxsize=1)
def table() -> tuple[TableEntry, ...]:
    """Those with most marks first, newer versions first."""
    entries = []
    for file in files(__package__).joinpath("response_templates").iterdir():
        if file.name.endswith(".json"):
            content = json.loads(file.read_text(encoding="utf-8"))
            entry = TableEntry(
                name=file.name.removesuffix(".json"),
                marks=tuple(content["marks"]),
                is_whole_turn=content.get("is_whole_turn", False),
                template=read_template(content["response_template"]),
            )
            entries.append(entry)
    return tuple(sorted(entries, key=lambda entry: (len(entry.marks), _version(entry.name), entry.name), reverse=True))


def chosen(chat_template: str | None) -> TableEntry:
    """By the marks in a model's chat template."""
    if chat_template is None:
        return NO_ENTRY
    return next((entry for entry in table() if all(mark in chat_template for mark in entry.marks)), NO_ENTRY)


def named(name: str) -> TableEntry | None:
    """None: this release does not have it."""
    return next((entry for entry in (*table(), NO_ENTRY) if entry.name == name), None)


def own(source: str) -> TableEntry:
    """Of a checkpoint that declares its marks. Raises TemplateError."""
    digest = hashlib.blake2b(source.encode(), digest_size=8).hexdigest()
    return TableEntry(f"{_OWN}:{digest}@{_OWN_FORM}", (), False, read_template(source))


def _version(name: str) -> int:
    return int(name.rpartition("@")[2])

"""Parts of an answer on a terminal: text as it is, each call on a line of its own, reasoning dimmed beside them."""

import sys
from collections.abc import Iterable

import typer

from paceline_client.results import OutputPart, ReasoningPart, ToolCallPart


class ShownParts:
    """Of one answer. Reasoning is no answer: it goes to standard error, where that is a terminal."""

    def __init__(self) -> None:
        self._is_thinking = self._is_calling = self._has_text = False

    def text_of(self, parts: Iterable[OutputPart]) -> str:
        """What of the parts goes to standard output."""
        pieces = []
        for part in parts:
            if isinstance(part, ReasoningPart):
                self._show(part.text)
                self._is_thinking = True
                continue
            if self._is_thinking:
                self._show("\n\n")
            is_new_line = self._has_text and (self._is_calling or isinstance(part, ToolCallPart))
            if isinstance(part, ToolCallPart):
                named = "" if part.name is None else "\n" * is_new_line + f"{part.name} "
                pieces.append(named + part.arguments)
            else:
                pieces.append("\n" * is_new_line + part.text)
            self._is_thinking, self._is_calling, self._has_text = False, isinstance(part, ToolCallPart), True
        return "".join(pieces)

    def _show(self, text: str) -> None:
        if sys.stderr.isatty():
            typer.secho(text, err=True, dim=True, nl=False)

"""One completion's output cut into parts, token by token: a pure function of its prompt's tokens and its own.

What has been said after so many tokens depends on these tokens alone, however they came. Between tokens is kept: what
may become a mark, spaces that may be the end, and of a call what is not known yet to be one; each has a bound. What is
no mark, and a call that cannot be read, is text: nothing is left out but marks and the spaces around the whole of text
and reasoning.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from paceline.plan.values import Int32Array
from paceline_scheduler.api.text.detokenizer import Detokenizer, Spelling
from paceline_scheduler.api.text.parts.bound import BoundTemplate, OutputFormat
from paceline_scheduler.api.text.parts.calls import call_reader
from paceline_scheduler.api.text.parts.part import Part, PartKind, call_id
from paceline_scheduler.api.text.parts.patterns import MAX_MARK_CHARS, UNFINISHED, Match
from paceline_scheduler.api.text.parts.reading import CallReader, NoCallError

_MAX_HELD_SPACES = 512
_MAX_TOKENS_BEHIND_ANCHOR = 4096  # looked through where no token begins an anchor
_MAX_TURNS, _MAX_ANCHOR_TOKENS = 64, 32  # looked at where one does


@dataclass(frozen=True, slots=True)
class Wanted:
    """`tools` are JSON Schema documents by the tools' names."""

    request_id: str
    completion: int
    tools: Mapping[str, str]
    takes_calls: bool = True


class _Trimmed:
    """Spaces at both ends are left out."""

    __slots__ = ("_has_begun", "_spaces")

    def __init__(self) -> None:
        self._has_begun = False
        self._spaces = ""

    def take(self, piece: str) -> str:
        """Returns what is said now."""
        if self._has_begun and not self._spaces and piece and not piece[-1].isspace():
            return piece
        if not self._has_begun:
            piece = piece.lstrip()
            self._has_begun = bool(piece)
        shown = piece.rstrip()
        if not shown:
            self._spaces += piece
            if len(self._spaces) <= _MAX_HELD_SPACES:
                return ""
            spaces, self._spaces = self._spaces, ""
            return spaces
        spaces, self._spaces = self._spaces, piece[len(shown) :]
        return spaces + shown

    def forget_spaces(self) -> None:
        self._spaces = ""


class PartCutter:
    def __init__(self, output_format: OutputFormat, wanted: Wanted) -> None:
        self.num_reasoning_tokens = 0
        """With the marks."""
        self._parts: list[Part] = []  # nobody has taken yet
        self._template: BoundTemplate = output_format.template
        self._marks = self._template.alphabet.by_token
        self._wanted = wanted
        calls = wanted.takes_calls and self._template.call is not None
        self._opens = self._template.opens if calls else self._template.opens_without_calls
        self._may_be_turn = calls and self._template.is_whole_turn and bool(wanted.tools)
        self._trimmed = {kind: _Trimmed() for kind in (PartKind.TEXT, PartKind.REASONING)}
        self._kind = PartKind.TEXT
        self._call: CallReader | None = None  # that is being read
        self._is_closing = False  # its closing mark comes
        self._num_calls = 0
        self._held = ""
        self._num_held_tokens = 0  # that may begin reasoning

    @property
    def is_reasoning(self) -> bool:
        return self._kind is PartKind.REASONING

    def begin(self, prompt_token_ids: Int32Array, spelling: Spelling) -> None:
        """A template may have begun the turn, and opened or closed its reasoning."""
        self._read(_behind_anchor(self._template, prompt_token_ids, spelling), is_end=True)
        self._held, self._num_calls, self._call, self._is_closing = "", 0, None, False
        self._parts.clear()
        for trimmed in self._trimmed.values():
            trimmed.forget_spaces()

    def take(self, token_id: int, piece: str) -> None:
        """`piece` is what the token adds to the text; special ones may add nothing."""
        was_reasoning = self.is_reasoning
        mark = self._marks.get(token_id)
        # The token counts, not its letters.
        self.add(piece if mark is None else piece.removesuffix(self._template.alphabet.spell(mark)) + mark)
        if was_reasoning or self.is_reasoning:
            self.num_reasoning_tokens += 1 + self._num_held_tokens
            self._num_held_tokens = 0
        else:
            self._num_held_tokens = self._num_held_tokens + 1 if self._held and self._call is None else 0

    def add(self, text: str) -> None:
        if not (self._held or self._is_closing or self._may_be_turn):  # nearly all passes by
            if self._call is not None:
                if self._call.passes(text):
                    return
            else:
                marks = self._opens if self._kind is PartKind.TEXT else self._template.reasoning_closes
                if marks.firsts.isdisjoint(text):
                    self._say(text)
                    return
        self._read(text, is_end=False)

    def finish(self) -> None:
        """Nothing follows."""
        self._read("", is_end=True)

    def taken(self) -> list[Part]:
        """Returns what is new."""
        parts, self._parts = self._parts, []
        return parts

    def _read(self, piece: str, *, is_end: bool) -> None:
        text, self._held = self._held + piece, ""
        position = 0
        while position < len(text) or (is_end and self._call is not None and not self._is_closing):
            if self._call is None:
                read, goes_on = self._read_free(text, position, is_end)
            elif self._is_closing:
                read, goes_on = self._read_close(text, position, is_end)
            else:
                read, goes_on = self._read_call(text, position, is_end)
            position = read
            if not goes_on:
                break
        self._held = text[position:]
        if is_end and self._held:
            self._say(self._held)
            self._held = ""

    def _read_free(self, text: str, position: int, is_end: bool) -> tuple[int, bool]:
        if self._may_be_turn:
            start = len(text) - len(text[position:].lstrip())
            if start == len(text):
                return position, False
            self._may_be_turn = False
            if text[start] == "{":
                self._open_call(text, start, Match(start, start, {}))
                return start, True
        is_reasoning = self._kind is PartKind.REASONING
        marks = self._template.reasoning_closes if is_reasoning else self._opens
        start, found, pattern = marks.search(text, position, is_end=is_end)
        self._say(text[position:start])
        if found is None:
            return start, start < len(text) and is_end
        if is_reasoning:
            self._kind = PartKind.TEXT
        elif pattern in self._template.reasoning_opens:
            self._kind = PartKind.REASONING
        elif pattern not in self._template.skipped:
            self._open_call(text, start, found)
        return found.end, True

    def _open_call(self, text: str, start: int, found: Match) -> None:
        assert self._template.call is not None, "there is an opening mark"
        opening = text[start : found.end]
        try:
            self._call = call_reader(self._template.call, self, opening, found.groups, self._wanted.tools)
        except NoCallError:
            self._say(opening)

    def _read_call(self, text: str, position: int, is_end: bool) -> tuple[int, bool]:
        call = self._call
        assert call is not None, "asked before"
        try:
            read, is_over = call.read(text, position, is_end)
        except NoCallError as error:
            # Text, marks in it too: else a text would be read many times.
            self._call = None
            self._say(call.unsaid.take())
            return position if error.said_to is None else error.said_to, True
        if is_over:
            self._is_closing = True
            return read, True
        if is_end:
            self._call = None
            self._say(call.unsaid.take())
            return read, False
        return read, False

    def _read_close(self, text: str, position: int, is_end: bool) -> tuple[int, bool]:
        assert self._template.call is not None, "one was read"
        start, closes = position, self._template.call.closes
        while start < len(text) and text[start].isspace() and start - position < MAX_MARK_CHARS:
            start += 1
        if start == len(text) and not is_end and closes.patterns:
            return position, False
        found, _ = closes.match(text, start, is_end=is_end)
        if found is UNFINISHED:
            return position, False
        self._call, self._is_closing = None, False
        return (found.end if isinstance(found, Match) else position), True

    def begin_call(self, name: str) -> None:
        index, self._num_calls = self._num_calls, self._num_calls + 1
        named = call_id(self._wanted.request_id, self._wanted.completion, index)
        self._parts.append(Part(PartKind.CALL, "", index, named, self._template.alphabet.spell(name)))

    def add_arguments(self, piece: str) -> None:
        if piece:
            self._put(PartKind.CALL, self._template.alphabet.spell(piece), self._num_calls - 1)

    def _say(self, text: str) -> None:
        shown = self._template.alphabet.spell(text)
        if self._template.has_marks:
            shown = self._trimmed[self._kind].take(shown)
        if shown:
            self._put(self._kind, shown, 0)

    def _put(self, kind: PartKind, text: str, index: int) -> None:
        last = self._parts[-1] if self._parts else None
        if last is not None and last.kind is kind and last.index == index:
            last.text += text
        else:
            self._parts.append(Part(kind, text, index))


def _behind_anchor(template: BoundTemplate, token_ids: Int32Array, spelling: Spelling) -> str:
    """What the prompt says behind the last beginning of a turn of the model; "" where there is none."""
    by_token, anchors = template.alphabet.by_token, template.anchors
    if not anchors.firsts.issubset(by_token.values()):
        text = _written(template, token_ids[-_MAX_TOKENS_BEHIND_ANCHOR:].tolist(), spelling)
        end = position = 0
        while (found := anchors.search(text, position, is_end=True)[1]) is not None:
            end = position = found.end
        return text[end:] if end else ""
    firsts = [token_id for token_id, mark in by_token.items() if mark in anchors.firsts]
    for start in np.flatnonzero(np.isin(token_ids, firsts))[-_MAX_TURNS:][::-1].tolist():
        turn = token_ids[start:].tolist()
        anchor, _ = anchors.match(_written(template, turn[:_MAX_ANCHOR_TOKENS], spelling), 0, is_end=True)
        if isinstance(anchor, Match):
            return _written(template, turn, spelling)[anchor.end :]
    return ""


def _written(template: BoundTemplate, token_ids: list[int], spelling: Spelling) -> str:
    """Not the beginning of a text, which some models strip of a space."""
    by_token, pieces = template.alphabet.by_token, []
    detokenizer = Detokenizer(spelling, skip_special_tokens=True, before=token_ids)
    for token_id in token_ids:
        mark = by_token.get(token_id)
        pieces.append(detokenizer.take([token_id]) if mark is None else detokenizer.flush() + mark)
    return "".join((*pieces, detokenizer.flush()))

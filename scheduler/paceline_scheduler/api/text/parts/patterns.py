"""The marks of a response template: a closed subset of regular expressions, each matched in one pass.

Patterns come with checkpoints, so they are foreign code for the event loop. A pattern is a sequence of letters, `\\s*`,
`\\w+`, `.*?` up to letters, and named groups of these; it begins with letters. No item can end in two places: nothing
is ever tried twice, and no mark is longer than MAX_MARK_CHARS.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum

MAX_MARK_CHARS = 512
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}
_OPERATORS = "*+?{}|^$[]()."


class PatternError(ValueError):
    """It is outside the subset; the sentence says why."""


class ItemKind(Enum):
    LETTERS = "letters"
    SPACES = r"\s*"
    WORD = r"\w+"
    ANYTHING = ".*?"


@dataclass(frozen=True, slots=True)
class Item:
    kind: ItemKind
    letters: str = ""
    group: str = ""


@dataclass(frozen=True, slots=True)
class Match:
    start: int
    end: int
    groups: dict[str, str]


class Unfinished:
    """More text decides."""


UNFINISHED = Unfinished()


@dataclass(frozen=True, slots=True)
class Pattern:
    items: tuple[Item, ...]

    def match(self, text: str, start: int, *, is_end: bool = False) -> Match | Unfinished | None:
        """At `start`. `is_end`: no more text follows."""
        found = self._match(text, start, is_end)
        if found is UNFINISHED and (is_end or len(text) - start > MAX_MARK_CHARS):
            return None
        return None if isinstance(found, Match) and found.end - start > MAX_MARK_CHARS else found

    def _match(self, text: str, start: int, is_end: bool) -> Match | Unfinished | None:
        position, length = start, len(text)
        groups: dict[str, str] = {}
        for index, item in enumerate(self.items):
            begin = position
            if item.kind is ItemKind.LETTERS:
                if not text.startswith(item.letters, position):
                    return UNFINISHED if item.letters.startswith(text[position:]) else None
                position += len(item.letters)
            elif item.kind is ItemKind.ANYTHING:
                position = text.find(self.items[index + 1].letters, position)
                if position < 0:
                    return UNFINISHED
            else:
                belongs = str.isspace if item.kind is ItemKind.SPACES else _is_of_word
                while position < length and belongs(text[position]):
                    position += 1
                if position == length and not is_end:
                    return UNFINISHED
                if item.kind is ItemKind.WORD and position == begin:
                    return None
            if item.group:
                groups[item.group] = groups.get(item.group, "") + text[begin:position]
        return Match(start, position, groups)

    def written(self, write: Callable[[str], str]) -> "Pattern":
        """Its letters in another alphabet."""
        return Pattern(tuple(replace(item, letters=write(item.letters)) for item in self.items))

    @property
    def first(self) -> str:
        return self.items[0].letters[0]

    @property
    def groups(self) -> frozenset[str]:
        return frozenset(item.group for item in self.items if item.group)


class Marks:
    """Several patterns, looked for at once: the first to begin counts, of those that begin together the longest."""

    def __init__(self, patterns: Iterable[Pattern]) -> None:
        self.patterns = tuple(patterns)
        self.firsts = frozenset(pattern.first for pattern in self.patterns)
        self._any_first = re.compile(
            "[" + "".join(map(re.escape, sorted(self.firsts))) + "]" if self.firsts else "(?!)"
        )

    def search(self, text: str, position: int, *, is_end: bool = False) -> tuple[int, Match | None, Pattern | None]:
        """Returns where a mark begins, the mark and its pattern. No mark: what begins there may become one."""
        while (first := self._any_first.search(text, position)) is not None:
            position = first.start()
            found, pattern = self.match(text, position, is_end=is_end)
            if isinstance(found, Match):
                return position, found, pattern
            if found is not None:
                return position, None, None
            position += 1
        return len(text), None, None

    def match(
        self, text: str, position: int, *, is_end: bool = False
    ) -> tuple[Match | Unfinished | None, Pattern | None]:
        best: tuple[Match | None, Pattern | None] = None, None
        for pattern in self.patterns:
            found = pattern.match(text, position, is_end=is_end)
            if found is UNFINISHED:
                return UNFINISHED, None
            if isinstance(found, Match) and (best[0] is None or found.end > best[0].end):
                best = found, pattern
        return best


def letters(text: str) -> Pattern:
    """Raises PatternError."""
    if not 0 < len(text) <= MAX_MARK_CHARS:
        raise PatternError(f"a mark has {len(text)} characters, must have 1 to {MAX_MARK_CHARS}")
    return Pattern((Item(ItemKind.LETTERS, text),))


def read_pattern(source: str) -> Pattern:
    """Raises PatternError."""
    if len(source) > MAX_MARK_CHARS:
        raise PatternError(f"the pattern has {len(source)} characters, at most {MAX_MARK_CHARS} are taken")
    items: list[Item] = []
    position, group, seen = 0, "", set[str]()
    while position < len(source):
        if not group and (named := re.compile(r"\(\?P<(\w+)>").match(source, position)):
            position, group = named.end(), named[1]
            if group in seen:
                raise PatternError(f"{source!r} names the group {group!r} twice")
            seen.add(group)
        elif group and source[position] == ")":
            position, group = position + 1, ""
        else:
            item, position = _read_item(source, position)
            last = items[-1] if items else None
            if last and last.kind is item.kind is ItemKind.LETTERS and last.group == group:
                items[-1] = replace(last, letters=last.letters + item.letters)
            else:
                items.append(replace(item, group=group))
    if group:
        raise PatternError(f"{source!r} does not close the group {group!r}")
    _check_ends(source, items)
    return Pattern(tuple(items))


def _read_item(source: str, position: int) -> tuple[Item, int]:
    for kind in (ItemKind.SPACES, ItemKind.WORD, ItemKind.ANYTHING):
        if source.startswith(kind.value, position):
            return Item(kind), position + len(kind.value)
    letter = source[position]
    if letter == "\\" and position + 1 < len(source):
        escaped = source[position + 1]
        if escaped in _ESCAPES or not escaped.isalnum():
            return Item(ItemKind.LETTERS, _ESCAPES.get(escaped, escaped)), position + 2
    elif letter not in _OPERATORS + "\\":
        return Item(ItemKind.LETTERS, letter), position + 1
    raise PatternError(
        f"{source!r} has {source[position : position + 4]!r}; a pattern is made of letters, \\s*, \\w+, .*? before"
        " letters, and named groups of these"
    )


def _check_ends(source: str, items: list[Item]) -> None:
    if not items or items[0].kind is not ItemKind.LETTERS:
        raise PatternError(f"{source!r} does not begin with letters")
    for item, after in zip(items, (*items[1:], None), strict=True):
        first = after.letters[0] if after and after.kind is ItemKind.LETTERS else ""
        is_clear = {
            ItemKind.LETTERS: True,
            ItemKind.SPACES: after is None or bool(first and not first.isspace()) or after.kind is ItemKind.WORD,
            ItemKind.WORD: after is None or bool(first and not _is_of_word(first)) or after.kind is ItemKind.SPACES,
            ItemKind.ANYTHING: bool(first),
        }
        if not is_clear[item.kind]:
            raise PatternError(f"{source!r} does not say by letters where {item.kind.value} ends")


def _is_of_word(letter: str) -> bool:
    return letter.isalnum() or letter == "_"

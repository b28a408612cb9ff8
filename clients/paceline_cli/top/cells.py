"""Texts in cells of a terminal: cut, padded and wrapped to a width, and made harmless.

What clients and servers say is shown here, so nothing of it may move the cursor or hide what stands beside it.
"""

from prompt_toolkit.utils import get_cwidth

_CUT = "…"


def harmless(text: str) -> str:
    """Every character that a terminal would not simply show becomes a question mark."""
    return "".join(one if one.isprintable() and get_cwidth(one) > 0 else "?" for one in text)


def width_of(text: str) -> int:
    return sum(map(get_cwidth, text))


def cut(text: str, width: int) -> str:
    """The beginning of a text, if all of it is wider."""
    if width_of(text) <= width:
        return text
    return _taken(text, width - 1) + _CUT if width > 0 else ""


def cut_front(text: str, width: int) -> str:
    """The end of a text, if all of it is wider: of an address what tells it from others."""
    if width_of(text) <= width:
        return text
    return _CUT + _taken(text[::-1], width - 1)[::-1] if width > 0 else ""


def left(text: str, width: int) -> str:
    """Exactly so many cells."""
    shown = cut(text, width)
    return shown + " " * (width - width_of(shown))


def right(text: str, width: int) -> str:
    """Exactly so many cells, with the text at their end."""
    shown = cut(text, width)
    return " " * (width - width_of(shown)) + shown


def wrap(text: str, width: int) -> list[str]:
    """Lines no wider than this, at least one cell; broken at blanks where there are any."""
    lines, line = [], ""
    for word in text.split():
        longer = f"{line} {word}" if line else word
        if width_of(longer) <= width:
            line = longer
            continue
        if line:
            lines.append(line)
        while width_of(word) > width:
            part = _taken(word, width) or "?"
            lines.append(part if width_of(part) <= width else "?")
            word = word[len(part) :]
        line = word
    return [*lines, line] if line else lines


def _taken(text: str, width: int) -> str:
    """As many characters as fit."""
    taken, num_cells = [], 0
    for one in text:
        num_cells += get_cwidth(one)
        if num_cells > width:
            break
        taken.append(one)
    return "".join(taken)

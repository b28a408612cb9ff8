"""The help of a program as `paceline --help` shows its own: panels of options, each with its form and its default."""

import argparse
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn, TextIO

from typing_extensions import override

_MAX_WIDTH = 120  # characters; longer lines are hard to follow
_MIN_TEXT_WIDTH = 16
_GAP = 2
_BOLD, _PLAIN = "\033[1m", "\033[0m"
_PLAIN_BOX = str.maketrans("╭╮╰╯│─", "++++|-")  # where the others cannot be written

Panel = tuple[str, Sequence[tuple[str, ...]]]
"""A title, and rows of cells, as many in each."""

EXIT_CODES: Panel = (
    "Exit codes",
    (
        ("0", "Drained and ended in good order, or asked to stop before it had started."),
        ("1", "Unexpected failure, logged."),
        ("2", "Usage. A start with the same arguments ends the same way; after the others it may succeed."),
        ("4", "A port is in use, or the address is not this machine's."),
        ("6", "--shutdown-timeout passed, or a second signal came, before all requests were finished."),
    ),
)
"""Of programs that serve requests and know no model."""


class HelpParser(argparse.ArgumentParser):
    """An ArgumentParser with such a help: its groups as panels, then those of `panels`."""

    def __init__(self, prog: str, description: str, panels: Sequence[Panel]) -> None:
        super().__init__(
            prog=prog, usage="%(prog)s [OPTIONS]", description=description, add_help=False, allow_abbrev=False
        )
        self.add_argument("--help", "-h", action="help", help="Show this message and exit.")
        self._panels = panels

    @override
    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Refuse the empty text of a shell variable that is unset: it would mean the default, or this folder."""
        if not arg_string:
            raise argparse.ArgumentError(action, "is empty: give a value, or leave the option out")
        return super()._get_value(action, arg_string)

    @override
    def error(self, message: str) -> NoReturn:
        """Begin with the option that it is about."""
        super().error(message.removeprefix("argument "))

    @override
    def format_usage(self) -> str:
        """Return nothing: the error below it says more."""
        return ""

    @override
    def format_help(self) -> str:
        """Return it as wide as the terminal, in bold where stdout is one."""
        width = min(shutil.get_terminal_size().columns, _MAX_WIDTH)
        is_bold = sys.stdout.isatty()
        _, own, *others = self._action_groups  # the first is that of positional arguments, of which there are none
        own.title = "Options"
        panels = [(group.title or "", _rows(group)) for group in (*others, own)]
        paragraphs = (self.description or "").split("\n\n")
        described = "\n\n".join(
            textwrap.fill(part, width, initial_indent=" ", subsequent_indent=" ") for part in paragraphs
        )
        boxes = "\n".join(_box(panel, width, is_bold=is_bold) for panel in (*panels, *self._panels))
        text = f"\n Usage: {self.prog} [OPTIONS]\n\n{described}\n\n{boxes}\n"
        return text if _takes_boxes(sys.stdout) else text.translate(_PLAIN_BOX)


def _takes_boxes(file: TextIO) -> bool:
    return (file.encoding or "").lower().startswith("utf")


def _rows(group: argparse._ArgumentGroup) -> list[tuple[str, ...]]:
    return [_row(action) for action in group._group_actions]  # noqa: SLF001  argparse has no public name for them


def _row(action: argparse.Action) -> tuple[str, ...]:
    """Return an option's names, the form of its value, and what it is for."""
    form = "" if action.nargs == 0 else str(action.metavar)
    text = (action.help or "") % {"default": action.default}
    return ", ".join(action.option_strings), form, f"{text} [required]" if action.required else text


def _box(panel: Panel, width: int, *, is_bold: bool) -> str:
    title, rows = panel
    *widths, _ = (max(map(len, cells)) for cells in zip(*rows, strict=True))
    indent = sum(size + _GAP for size in widths if size)
    text_width = max(width - 4 - indent, _MIN_TEXT_WIDTH)
    lines = [f"╭─ {title} ".ljust(indent + text_width + 3, "─") + "╮"]
    for *cells, text in rows:
        head = "".join(cell.ljust(size + _GAP) for cell, size in zip(cells, widths, strict=True) if size)
        for number, part in enumerate(textwrap.wrap(text, text_width, break_on_hyphens=False)):
            start = head if number == 0 else " " * indent
            if is_bold and number == 0:
                start = f"{_BOLD}{start}{_PLAIN}"
            lines.append(f"│ {start}{part.ljust(text_width)} │")
    return "\n".join([*lines, "╰" + "─" * (indent + text_width + 2) + "╯"])

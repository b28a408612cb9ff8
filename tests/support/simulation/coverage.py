"""Which lines of the executor's link and rows runs execute, counted by the interpreter's own trace function.

Lines of function bodies only: what an import executes shows nothing.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING

import paceline_executor

if TYPE_CHECKING:
    from _typeshed import TraceFunction

_ROOT = Path(paceline_executor.__file__).parent
_LINK = (
    "description",
    "engine",
    "failure_attribution",
    "fence",
    "plan_stream",
    "plan_streams",
    "result_batcher",
    "step_loop",
)
_ROWS = sorted(path.stem for path in (_ROOT / "rows").glob("*.py") if path.stem != "__init__")
FILES = (*(_ROOT / "link" / f"{name}.py" for name in _LINK), *(_ROOT / "rows" / f"{name}.py" for name in _ROWS))
"""All of rows, and of link what holds no gRPC call, no profile and no metric, but for the thread that steps run on."""


class LineCoverage:
    """The lines of `FILES` that were executed while it was active."""

    def __init__(self) -> None:
        self._seen: dict[str, set[int]] = {str(path): set() for path in FILES}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Watch for a while; everything takes some times as long."""
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(None)

    def missed(self, path: Path) -> list[int]:
        """Return the lines of a file that were not executed."""
        return sorted(_lines_of(path) - self._seen[str(path)])

    @property
    def share(self) -> float:
        """How many of all lines were executed."""
        num_lines = sum(len(_lines_of(path)) for path in FILES)
        return 1 - sum(len(self.missed(path)) for path in FILES) / num_lines

    def __str__(self) -> str:
        lines = []
        for path in FILES:
            num_lines, missed = len(_lines_of(path)), self.missed(path)
            share = 1 - len(missed) / max(1, num_lines)
            lines.append(f"{share:6.1%} of {num_lines:3} lines  {path.relative_to(_ROOT)}  {_ranges(missed)}")
        return "\n".join((*lines, f"{self.share:6.1%} of all"))

    def _enter(self, frame: FrameType, event: str, argument: object) -> "TraceFunction | None":
        del event, argument
        return self._step if frame.f_code.co_filename in self._seen else None

    def _step(self, frame: FrameType, event: str, argument: object) -> "TraceFunction | None":
        del argument
        if event == "line":
            self._seen[frame.f_code.co_filename].add(frame.f_lineno)
        return self._step


def _lines_of(path: Path) -> set[int]:
    """Return the lines of a file that are in functions and do something."""
    return _lines_in(compile(path.read_text(), str(path), "exec"))


def _lines_in(code: CodeType) -> set[int]:
    lines: set[int] = set()
    if code.co_flags & CO_OPTIMIZED:
        lines = {line for _, _, line in code.co_lines() if line is not None and line != code.co_firstlineno}
    return lines.union(*(_lines_in(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def _ranges(lines: list[int]) -> str:
    """Return line numbers, of neighbours the first and the last."""
    starts = [line for line in lines if line - 1 not in lines]
    ends = [line for line in lines if line + 1 not in lines]
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))

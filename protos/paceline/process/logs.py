"""Events on stdout: JSON lines, or readable ones on a terminal, written by a thread of their own.

A disk that is full, a pipe that nobody reads and one that is closed stop no work: lines that find no room are lost,
are counted, and their number is told as soon as a line can be written again.
"""

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

import structlog

from paceline.process.log_bounds import CauseLimit, shortened

MAX_WAITING_LINES = 1024
_FIRST_KEYS, _LAST_KEY = ("timestamp", "level", "event"), "exception"


class LineWriter:
    """Writes lines to a file descriptor, in order. Who hands one in never waits and never fails.

    `tell_lost` makes the line that says how many were lost. The file belongs to the caller.
    """

    def __init__(self, file: int, tell_lost: Callable[[int], str], max_waiting_lines: int = MAX_WAITING_LINES) -> None:
        self._file = file
        self._tell_lost = tell_lost
        self._max_waiting_lines = max_waiting_lines
        self._waiting: deque[str] = deque()  # the first one is being written
        self._held: dict[Hashable, tuple[float, str]] = {}  # lines by their cause, and when they are due
        self._changed = threading.Condition()
        self._num_lost = self._num_told = 0
        self._is_inside_a_line = False
        self._is_closed = False
        threading.Thread(target=self._run, name="logs", daemon=True).start()

    @property
    def num_lost(self) -> int:
        return self._num_lost

    def write(self, text: str) -> int:
        """Take whole lines; they are lost if too many wait already."""
        with self._changed:
            if len(self._waiting) < self._max_waiting_lines and not self._is_closed:
                self._waiting.append(text)
                self._changed.notify_all()
            else:
                self._num_lost += 1
        return len(text)

    def hold(self, cause: Hashable, due_s: float, text: str) -> None:
        """Take a whole line to be written later, in place of one of the same cause that is still held."""
        with self._changed:
            self._held[cause] = due_s, text
            self._changed.notify_all()

    def flush(self) -> None:
        """Do nothing: each line is written at once."""

    def finish(self, timeout_s: float) -> None:
        """Wait until everything is written or lost, but not for longer than this."""
        self._release(float("inf"))
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Wait like `finish`, then let the thread end. What comes later is lost."""
        self.finish(timeout_s)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            self._release(time.monotonic())
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed, self._until_due())
                if not self._waiting and self._is_closed:
                    return
                if not self._waiting:
                    continue
                text, num_lost = self._waiting[0], self._num_lost
            if num_lost > self._num_told:
                text = self._tell_lost(num_lost - self._num_told) + text
            is_written = self._put(text.encode(errors="backslashreplace"))
            with self._changed:
                if is_written:
                    self._num_told = num_lost
                else:
                    self._num_lost += 1
                self._waiting.popleft()
                self._changed.notify_all()

    def _release(self, now_s: float) -> None:
        """Let those lines that are due wait to be written."""
        with self._changed:
            due = [cause for cause, (due_s, _) in self._held.items() if due_s <= now_s]
            lines = [self._held.pop(cause)[1] for cause in due]
        for line in lines:
            self.write(line)

    def _until_due(self) -> float | None:
        due = [due_s for due_s, _ in self._held.values()]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _put(self, data: bytes) -> bool:
        """Write all of it, beginning with a new line if the last one was cut off; returns whether that succeeded."""
        rest = b"\n" + data if self._is_inside_a_line else data
        try:
            while rest:
                num_written = os.write(self._file, rest)
                self._is_inside_a_line = rest[:num_written][-1:] != b"\n"
                rest = rest[num_written:]
        except OSError:
            return False
        return True


def set_up_logs(level: str, file: int | None = None) -> LineWriter:
    """Send this process's events of at least `level` to a file descriptor, by default stdout.

    Call `close` of what is returned before the process ends.
    """
    if file is None:
        file = _stdout()
    renderers: list[structlog.typing.Processor] = (
        [_short, structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
        if os.isatty(file)
        else [structlog.processors.format_exc_info, _short, _in_reading_order, structlog.processors.JSONRenderer()]
    )
    processors: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        *renderers,
    ]
    limit = CauseLimit()

    def write_or_hold(
        logger: structlog.typing.WrappedLogger, method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.ProcessorReturnValue:
        cause, due_s = limit.admit(event)
        line: Any = event
        for processor in processors:
            line = processor(logger, method, line)
        if due_s is None:
            return line  # type: ignore[no-any-return]  # a renderer returns text
        writer.hold(cause, due_s, f"{line}\n")
        raise structlog.DropEvent

    def tell_lost(num_lines: int) -> str:
        event: Any = {"event": "log_lines_lost", "num_lines": num_lines}
        for processor in processors:
            event = processor(None, "warning", event)
        return f"{event}\n"

    writer = LineWriter(file, tell_lost)
    structlog.configure(
        processors=[write_or_hold],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(writer),  # type: ignore[arg-type]  # it asks no more
        cache_logger_on_first_use=False,
    )
    return writer


def _stdout() -> int:
    # Started without a stdout, its number may be that of another file by now.
    return os.open(os.devnull, os.O_WRONLY) if sys.stdout is None else sys.stdout.fileno()


def _short(
    _logger: structlog.typing.WrappedLogger, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    kept = {key: event[key] for key in ("exc_info", "stack_info") if key in event}
    return {**shortened({key: value for key, value in event.items() if key not in kept}), **kept}


def _in_reading_order(
    _logger: structlog.typing.WrappedLogger, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """One order for every program: when and what, then the fields by name, then a traceback, which is long."""
    named = sorted(key for key in event if key not in (*_FIRST_KEYS, _LAST_KEY))
    return {key: event[key] for key in (*_FIRST_KEYS, *named, _LAST_KEY) if key in event}

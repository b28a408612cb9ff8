"""Events on stdout: JSON lines, or readable ones on a terminal."""

import logging
import os
import sys
from typing import Any

import structlog

from paceline.process.line_writer import LineWriter
from paceline.process.log_bounds import CauseLimit, shortened

_FIRST_KEYS, _LAST_KEY = ("timestamp", "level", "event"), "exception"


def set_up_logs(level: str, file: int | None = None) -> LineWriter:
    """Send this process's events of at least `level` to a file descriptor, by default stdout.

    Call `close` of what is returned before the process ends.
    """
    if file is None:
        file = sys.stdout.fileno()
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

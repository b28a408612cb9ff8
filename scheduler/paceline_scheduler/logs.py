"""Events on stdout: JSON lines, or readable ones on a terminal. A full disk or a closed pipe stops no work."""

import contextlib
import logging
import sys
from typing import TextIO

import structlog


class _Patient:
    """A text stream whose writer never fails: what cannot be written is lost."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


def set_up_logs(level: str, stream: TextIO | None = None) -> None:
    """Send this process's events of at least `level` to `stream`, by default stdout."""
    stream = stream or sys.stdout
    renderers: list[structlog.typing.Processor] = (
        [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
        if stream.isatty()
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(_Patient(stream)),  # type: ignore[arg-type]  # print asks no more
        cache_logger_on_first_use=False,
    )

"""Callbacks of the event loop that fail: nobody waits for them, so a process would go on half dead.

Knows which failures are this program's own. Refuses to know what follows from one.
"""

import asyncio
from types import TracebackType
from typing import Any, NoReturn

import structlog

_log = structlog.get_logger(__name__)

_OURS = ("paceline.", "paceline_")


def watch_callbacks(loop: asyncio.AbstractEventLoop) -> asyncio.Future[NoReturn]:
    """Return a future that fails as the first callback of Paceline does; what else goes wrong is only logged.

    Each failure is logged here, since whoever waits for the future may have stopped doing so.
    """
    broken: asyncio.Future[NoReturn] = loop.create_future()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if "handle" not in context or not isinstance(error, Exception) or not _is_ours(error.__traceback__):
            loop.default_exception_handler(context)
            return
        _log.error("callback_failed", exc_info=error)
        if not broken.done():
            broken.set_exception(error)

    loop.set_exception_handler(handle)
    return broken


def _is_ours(trace: TracebackType | None) -> bool:
    """Libraries fail in callbacks of their own, gRPC for one, and go on."""
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__", "").startswith(_OURS):
            return True
        trace = trace.tb_next
    return False

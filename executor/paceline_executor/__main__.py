"""The executor's command: reads the command line, runs the process, ends with a code that says why.

Everything but that is imported after signals are listened to and the command line is read, so that a stop is quiet
from the first moment, and --help and mistakes answer at once.
"""

import contextlib
import enum
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

_LAST_LINES_S = 0.5  # for a log that takes no more lines


class ExitCode(enum.IntEnum):
    """Why the process ended; `--help` explains them."""

    OK = 0
    FAILED = 1
    USAGE = 2
    MODEL = 3
    PORT = 4
    MACHINE = 5
    DRAIN_TIMEOUT = 6
    FETCH = 7


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run an executor until it is told to stop; never returns."""
    _end_quietly_on_signals()

    from paceline_executor import errors
    from paceline_executor.config import parse_config

    config = parse_config(arguments)

    import structlog
    import uvloop

    from paceline_executor.logs import set_up_logs

    log = set_up_logs(config.log_level)
    try:
        from paceline_executor import process

        code = ExitCode.OK if uvloop.run(process.run(config)) else ExitCode.DRAIN_TIMEOUT
    except errors.ExecutorError as error:
        _complain(str(error))
        code = _code_of(error)
        if code is ExitCode.FAILED:  # its log tells how it worked, and so why it ended
            structlog.get_logger().error("failed", reason=str(error))
    except Exception:
        structlog.get_logger().exception("failed")
        _complain("unexpected failure; its log says more")
        code = ExitCode.FAILED
    log.close(_LAST_LINES_S)
    # Without waiting for the step thread, which may be inside native code, or for libraries' exit handlers.
    os._exit(code)


def _end_quietly_on_signals() -> None:
    """Until the event loop follows them, SIGTERM and SIGINT end the process at once: nothing has begun."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(ExitCode.OK))


def _code_of(error: Exception) -> ExitCode:
    from paceline_executor import errors

    codes = (
        (errors.ModelFetchError, ExitCode.FETCH),
        (errors.ModelError, ExitCode.MODEL),
        (errors.PortError, ExitCode.PORT),
        (errors.LimitError, ExitCode.USAGE),
        (errors.StartError, ExitCode.MACHINE),
    )
    return next((code for kind, code in codes if isinstance(error, kind)), ExitCode.FAILED)


def _complain(sentence: str) -> None:
    if sys.stderr is None:  # `print` would take stdout, which is the log's
        return
    with contextlib.suppress(OSError):  # the exit code says it too
        print(f"paceline-executor: error: {sentence}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

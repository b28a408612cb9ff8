"""The scheduler's command: reads the command line, runs the process, ends with a code that says why.

Everything but that is imported after signals are listened to and the command line is read, so that a stop is quiet
from the first moment, and --help and mistakes answer at once.
"""

import enum
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn


class ExitCode(enum.IntEnum):
    """Why the process ended; `--help` explains them."""

    OK = 0
    FAILED = 1
    USAGE = 2
    PORT = 4
    DRAIN_TIMEOUT = 6


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a scheduler until it is told to stop; never returns."""
    _end_quietly_on_signals()

    from paceline_scheduler.config import parse_config, prepare_grpc
    from paceline_scheduler.errors import ConfigError, PortError

    try:
        config = parse_config(sys.argv[1:] if arguments is None else arguments)
    except ConfigError as error:
        _complain(str(error))
        sys.exit(ExitCode.USAGE)
    prepare_grpc()

    import structlog
    import uvloop

    from paceline_scheduler import process
    from paceline_scheduler.logs import set_up_logs

    set_up_logs(config.log_level)
    try:
        code = ExitCode.OK if uvloop.run(process.run(config)) else ExitCode.DRAIN_TIMEOUT
    except PortError as error:
        _complain(str(error))
        code = ExitCode.PORT
    except Exception:
        structlog.get_logger().exception("failed")
        _complain("unexpected failure; the log says more")
        code = ExitCode.FAILED
    _leave(code)


def _end_quietly_on_signals() -> None:
    """Until the event loop follows them, SIGTERM and SIGINT end the process at once: nothing has begun."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(ExitCode.OK))


def _complain(sentence: str) -> None:
    print(f"paceline-scheduler: error: {sentence}", file=sys.stderr)


def _leave(code: int) -> NoReturn:
    """End without waiting for threads of libraries."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()

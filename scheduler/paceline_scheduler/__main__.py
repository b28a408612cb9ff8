"""The scheduler's command: reads the command line, runs the process, ends with a code that says why.

Everything but that is imported after signals are listened to and the command line is read, so that a stop is quiet
from the first moment, and --help and mistakes answer at once.
"""

import contextlib
import enum
import gc
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from paceline_scheduler.config import Config
    from paceline_scheduler.logs import LineWriter

_LAST_LINES_S = 0.5  # for a log that takes no more lines


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
    gc.disable()  # what is made while the program starts stays; `process` enables it again

    from paceline_scheduler.config import parse_config, prepare_grpc, prepare_structlog
    from paceline_scheduler.errors import ConfigError, PortError

    try:
        config = parse_config(sys.argv[1:] if arguments is None else arguments)
    except ConfigError as error:
        _complain(str(error))
        sys.exit(ExitCode.USAGE)
    prepare_grpc()
    prepare_structlog()

    import structlog
    import uvloop

    from paceline_scheduler.logs import set_up_logs

    log = set_up_logs(config.log_level)
    try:
        code = ExitCode.OK if uvloop.run(_serve(config, log)) else ExitCode.DRAIN_TIMEOUT
    except PortError as error:
        _complain(str(error))
        code = ExitCode.PORT
    except Exception:
        structlog.get_logger().exception("failed")
        _complain("unexpected failure; the log says more")
        code = ExitCode.FAILED
    log.close(_LAST_LINES_S)
    # Without waiting for threads of libraries; what is buffered for stdout and stderr is written already.
    os._exit(code)


async def _serve(config: "Config", log: "LineWriter") -> bool:
    """Open the ports before most of the program is imported: clients connect meanwhile, and are answered after it."""
    from paceline_scheduler.servicer_ports import SchedulerPorts

    ports = SchedulerPorts()
    await ports.listen(config)

    from paceline_scheduler import process

    return await process.run(config, log, ports)


def _end_quietly_on_signals() -> None:
    """Until the event loop follows them, SIGTERM and SIGINT end the process at once: nothing has begun."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(ExitCode.OK))


def _complain(sentence: str) -> None:
    if sys.stderr is None:  # `print` would take stdout, which is the log's
        return
    with contextlib.suppress(OSError):  # the exit code says it too
        print(f"paceline-scheduler: error: {sentence}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

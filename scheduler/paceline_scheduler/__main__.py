"""The scheduler's command: reads the command line, runs the process, ends with a code that says why.

The rest is imported after signals are listened to and the command line is read, so that a stop is quiet from the first
moment, and --help and mistakes answer at once.
"""

import gc
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from paceline.process.command import (
    ExitCode,
    check_address_space,
    check_installed,
    complain,
    end,
    end_quietly_on_signals,
    open_standard_files,
)

if TYPE_CHECKING:
    from paceline.process.line_writer import LineWriter
    from paceline_scheduler.config import Config

_PROGRAM = "paceline-scheduler"


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    open_standard_files()
    end_quietly_on_signals()
    check_address_space(_PROGRAM, ExitCode.FAILED)
    gc.disable()  # what is made while the program starts stays

    from paceline.process.ports import PortError
    from paceline_scheduler.config import parse_config, prepare_grpc, prepare_structlog
    from paceline_scheduler.errors import ConfigError

    try:
        config = parse_config(sys.argv[1:] if arguments is None else arguments)
    except ConfigError as error:
        complain(_PROGRAM, str(error))
        sys.exit(ExitCode.USAGE)
    check_installed(_PROGRAM, "structlog", "uvloop", "numpy", "jinja2", "tokenizers", "prometheus_client")
    prepare_grpc()
    prepare_structlog()

    import structlog
    import uvloop

    from paceline.process.logs import set_up_logs

    log = set_up_logs(config.log_level)
    try:
        code = ExitCode.OK if uvloop.run(_serve(config, log)) else ExitCode.DRAIN_TIMEOUT
    except ConfigError as error:
        complain(_PROGRAM, str(error))
        code = ExitCode.USAGE
    except PortError as error:
        complain(_PROGRAM, str(error))
        code = ExitCode.PORT
    except Exception:
        structlog.get_logger().exception("failed")
        complain(_PROGRAM, "unexpected failure; the log says more")
        code = ExitCode.FAILED
    end(log, code)


async def _serve(config: "Config", log: "LineWriter") -> bool:
    """Open the ports before most of the program is imported: clients connect meanwhile."""
    from paceline_scheduler.serving.servicer_ports import SchedulerServers

    ports = SchedulerServers(config)
    await ports.listen()

    from paceline_scheduler import process

    return await process.run(config, log, ports)


if __name__ == "__main__":
    main()

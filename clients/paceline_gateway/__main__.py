"""The gateway's command: reads the command line, runs the process, ends with a code that says why."""

import sys
from collections.abc import Sequence
from typing import NoReturn

from paceline.process.command import (
    ExitCode,
    check_address_space,
    check_installed,
    complain,
    end,
    end_quietly_on_signals,
    open_standard_files,
)

_PROGRAM = "paceline-gateway"


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    open_standard_files()
    end_quietly_on_signals()
    check_address_space(_PROGRAM, ExitCode.FAILED)

    from paceline.process.ports import PortError
    from paceline_gateway.config import parse_config, prepare_grpc

    config = parse_config(sys.argv[1:] if arguments is None else arguments)
    check_installed(
        _PROGRAM, "structlog", "uvloop", "uvicorn", "httptools", "starlette", "msgspec", "prometheus_client"
    )
    prepare_grpc()

    import structlog
    import uvloop

    from paceline.process.logs import set_up_logs
    from paceline_client import InvalidRequestError
    from paceline_gateway.process import run

    log = set_up_logs(config.log_level)
    try:
        code = ExitCode.OK if uvloop.run(run(config)) else ExitCode.DRAIN_TIMEOUT
    except InvalidRequestError as error:
        complain(_PROGRAM, f"--target: {error}")
        code = ExitCode.USAGE
    except PortError as error:
        complain(_PROGRAM, str(error))
        code = ExitCode.PORT
    except Exception:
        structlog.get_logger().exception("failed")
        complain(_PROGRAM, "unexpected failure; the log says more")
        code = ExitCode.FAILED
    end(log, code)


if __name__ == "__main__":
    main()

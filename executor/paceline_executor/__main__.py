"""The executor's command: reads the command line, runs the process, ends with a code that says why.

The rest is imported after signals are listened to and the command line is read, so that a stop is quiet from the first
moment, and --help and mistakes answer at once.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
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

_PROGRAM = "paceline-executor"
_VALIDATIONS = (["validate-base"], ["validate-candidate"])


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    open_standard_files()
    end_quietly_on_signals()
    check_address_space(_PROGRAM, ExitCode.MACHINE)

    from paceline.process.ports import PortError
    from paceline_executor import errors
    from paceline_executor.config import RunnerKind, let_waiting_threads_sleep, parse_config

    arguments = list(sys.argv[1:] if arguments is None else arguments)
    # `paceline validate` starts `paceline-executor validate-base FOLDER [OPTIONS]`, and validate-candidate around it.
    validation = [arguments.pop(0), arguments.pop(0)] if arguments[:1] in _VALIDATIONS and len(arguments) > 1 else None
    config = parse_config(arguments)
    check_installed(_PROGRAM, "structlog", "uvloop", "numpy", "tokenizers", "torch", "prometheus_client")
    if config.runner is not RunnerKind.CUDA:  # which has other kernels
        check_installed(_PROGRAM, "numba")
    let_waiting_threads_sleep()

    import structlog
    import uvloop

    from paceline.process.logs import set_up_logs

    log = set_up_logs(config.log_level)

    def fail(error: errors.ExecutorError | PortError) -> NoReturn:
        complain(_PROGRAM, str(error))
        code = _code_of(error)
        if code is ExitCode.FAILED:  # its log tells why it ended
            structlog.get_logger().error("failed", reason=str(error))
        end(log, code)

    try:
        if validation is not None:
            from paceline_executor.validation.run import ValidationRole, validate

            validate(config, ValidationRole(validation[0]), Path(validation[1]))
            code = ExitCode.OK
        elif config.share.node:
            from paceline_executor.start.node import run_node

            run_node(config, fail)
        else:
            from paceline_executor import process

            code = ExitCode.OK if uvloop.run(process.run(config, fail)) else ExitCode.DRAIN_TIMEOUT
    except (errors.ExecutorError, PortError) as error:
        fail(error)
    except Exception:
        structlog.get_logger().exception("failed")
        complain(_PROGRAM, "unexpected failure; its log says more")
        code = ExitCode.FAILED
    end(log, code)


def _code_of(error: Exception) -> ExitCode:
    from paceline.process.ports import PortError
    from paceline_executor import errors

    codes = (
        (errors.ModelFetchError, ExitCode.FETCH),
        (errors.ModelError, ExitCode.MODEL),
        (PortError, ExitCode.PORT),
        (errors.LimitError, ExitCode.USAGE),
        (errors.StepTimesError, ExitCode.USAGE),
        (errors.ProbeTextError, ExitCode.USAGE),
        (errors.StartError, ExitCode.MACHINE),
    )
    return next((code for kind, code in codes if isinstance(error, kind)), ExitCode.FAILED)


if __name__ == "__main__":
    main()

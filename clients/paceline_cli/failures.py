"""How a command fails: one line on stderr and an exit code per kind of failure. Never a traceback."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from paceline_cli.output import abandon_stdout
from paceline_cli.supervisor.programs import ProgramMissingError
from paceline_cli.supervisor.supervisor import ChildFailedError
from paceline_client.errors import (
    AccessDeniedError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    PacelineError,
    RequestTimeoutError,
    ServerError,
    StreamError,
    UnavailableError,
)

EXIT_INTERRUPTED = 130
EXIT_TIMED_OUT = 124

# The first that fits counts. The numbers are those of sysexits.h, and of the shell for time-outs and interrupts.
_EXIT_CODES: tuple[tuple[type[PacelineError], int], ...] = (
    (InvalidRequestError, os.EX_DATAERR),
    (NotFoundError, os.EX_NOINPUT),
    (OverloadedError, os.EX_TEMPFAIL),
    (UnavailableError, os.EX_UNAVAILABLE),
    (AccessDeniedError, os.EX_NOPERM),
    (RequestTimeoutError, EXIT_TIMED_OUT),
    (StreamError, os.EX_PROTOCOL),
    (ServerError, os.EX_SOFTWARE),
)


def exit_code_of(error: PacelineError) -> int:
    return next((code for kind, code in _EXIT_CODES if isinstance(error, kind)), 1)


def describe(error: PacelineError) -> str:
    """The error in one line: what is wrong, where, and when to try again."""
    text = " ".join(str(error).split())
    fields = [violation.field for violation in error.violations if violation.field not in text]
    if fields:
        text += f" ({', '.join(fields)})"
    text = text.replace("send text instead", "continue a text with: paceline generate --raw")
    if error.reason == "STANDBY":
        return text + _elsewhere(error)
    if error.retry_after:
        text = f"{text.removesuffix('; try again')}; try again in {error.retry_after:.1f} s"
    if error.reason == "CONNECT_FAILED":
        text += ". Is it running? Start one with: paceline up"
    return text


def _elsewhere(error: PacelineError) -> str:
    address = error.metadata.get("active_address")
    return f"; it cannot be reached from here. Try: --target {address}" if address else ""


def print_error(text: str) -> None:
    typer.echo(f"error: {text}", err=True)


@contextmanager
def reported() -> Iterator[None]:
    """Turn failures inside the block into a line and an exit code."""
    try:
        yield
    except PacelineError as error:
        print_error(describe(error))
        raise typer.Exit(exit_code_of(error)) from None
    except ProgramMissingError as error:
        print_error(str(error))
        raise typer.Exit(os.EX_CONFIG) from None
    except ChildFailedError as error:
        print_error(str(error))
        raise typer.Exit(error.exit_code if error.exit_code > 0 else 1) from None
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:
        abandon_stdout()
        raise typer.Exit(128 + 13) from None

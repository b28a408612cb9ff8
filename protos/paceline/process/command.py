"""The first and the last thing that a program does.

Apart from `signals`, because it imports next to nothing: a stop may come at any moment.
"""

import contextlib
import enum
import os
import resource
import signal
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from paceline.process.line_writer import LineWriter

_STANDARD_FILES = ("stdin", "stdout", "stderr")
_LEAST_ADDRESSES = 1 << 30  # what libraries and their threads take, without a model
_LAST_LINES_S = 0.5  # for a log that takes no more lines


class ExitCode(enum.IntEnum):
    """Why a program ended; `--help` explains those that it has."""

    OK = 0
    FAILED = 1
    USAGE = 2
    MODEL = 3
    PORT = 4
    MACHINE = 5
    DRAIN_TIMEOUT = 6
    FETCH = 7


def open_standard_files() -> None:
    """Open what is closed of stdin, stdout and stderr to nowhere.

    The next file would get its number, and a library that writes there or closes it would end the process.
    """
    while (file := os.open(os.devnull, os.O_RDWR)) < len(_STANDARD_FILES):
        os.set_inheritable(file, True)
        setattr(sys, _STANDARD_FILES[file], os.fdopen(file, "r" if file == 0 else "w"))
    os.close(file)


def end_quietly_on_signals() -> None:
    """Until the event loop follows them, SIGTERM and SIGINT end the process at once: nothing has begun."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))


def complain(program: str, sentence: str) -> None:
    """Say on stderr why a program ends."""
    with contextlib.suppress(OSError):  # the exit code says it too
        print(f"{program}: error: {sentence}", file=sys.stderr, flush=True)


def check_address_space(program: str, code: ExitCode) -> None:
    """End with this exit code and a sentence where libraries would abort, or wait for ever, for want of addresses."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if resource.RLIM_INFINITY != limit < _LEAST_ADDRESSES:
        allowed, least = limit >> 20, _LEAST_ADDRESSES >> 20
        complain(program, f"ulimit -v allows {allowed} MiB of addresses, and libraries take {least}: raise it")
        sys.exit(code)


def check_installed(program: str, *modules: str) -> None:
    """End with exit code 2 and a sentence where a module is missing that the program's extra brings."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        extra = program.removeprefix("paceline-")
        complain(
            program, f"{', '.join(missing)} not installed: in the checkout, pip install ./protos ./clients '.[{extra}]'"
        )
        sys.exit(ExitCode.USAGE)


def end(log: "LineWriter", code: ExitCode) -> NoReturn:
    """End the process with its last lines written, and without waiting for anything else.

    Threads of libraries, and one that is inside native code, would keep it, and so would exit handlers.
    """
    log.close(_LAST_LINES_S)
    os._exit(code)

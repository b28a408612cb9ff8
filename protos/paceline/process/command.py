"""The first and the last thing that a program does.

Apart from `signals`, because it imports next to nothing: a stop may come at any moment.
"""

import contextlib
import os
import signal
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from paceline.process.logs import LineWriter

_USAGE = 2
_LAST_LINES_S = 0.5  # for a log that takes no more lines


def end_quietly_on_signals() -> None:
    """Until the event loop follows them, SIGTERM and SIGINT end the process at once: nothing has begun."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))


def complain(program: str, sentence: str) -> None:
    """Say on stderr why a program ends, if it has one."""
    if sys.stderr is None:  # `print` would take stdout, which is the log's
        return
    with contextlib.suppress(OSError):  # the exit code says it too
        print(f"{program}: error: {sentence}", file=sys.stderr, flush=True)


def check_installed(program: str, *modules: str) -> None:
    """End with exit code 2 and a sentence where a module is missing that the program's extra brings."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        extra = program.removeprefix("paceline-")
        complain(
            program, f"{', '.join(missing)} not installed: in the checkout, pip install ./protos ./clients '.[{extra}]'"
        )
        sys.exit(_USAGE)


def end(log: "LineWriter", code: int) -> NoReturn:
    """End the process with its last lines written, and without waiting for anything else.

    Threads of libraries, and one that is inside native code, would keep it, and so would exit handlers.
    """
    log.close(_LAST_LINES_S)
    os._exit(code)

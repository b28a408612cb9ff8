"""Which options the programs have, and which are agreed and on their way.

Apart from what renders and what runs: both ask.
"""

import functools

from repository_checks.knobs import options
from repository_checks.programs import run

# One that has come is checked and used like the rest, with nothing to change here.
COMING = frozenset({"--tls-dir", "--tokens", "--insecure", "--gpu-memory-utilization"})


@functools.cache
def options_of(*command: str) -> frozenset[str]:
    """What the help of a program, or of a command of it, names."""
    return frozenset(options(run(*command, "--help").stdout))


def without_coming(program: str, args: list[str]) -> list[str]:
    """Arguments without the options that this program, or the command of it that comes first, does not have yet."""
    command = args[:1] if program == "paceline" else []
    missing = COMING - options_of(program, *command)
    return [argument for argument in args if argument.partition("=")[0] not in missing]

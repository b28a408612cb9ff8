"""Which options the programs have.

Apart from what renders and what runs: both ask.
"""

import functools

from repository_checks.knobs import options
from repository_checks.programs import run


@functools.cache
def options_of(*command: str) -> frozenset[str]:
    """What the help of a program, or of a command of it, names."""
    return frozenset(options(run(*command, "--help").stdout))

"""Where an error of this library points to: the caller's line, not what was going on inside.

Apart, because both clients raise by way of it. What was going on inside is logged by `paceline_client` at level DEBUG.
"""

import logging

from paceline_client.errors import PacelineError

_log = logging.getLogger("paceline_client")


def at_the_call(error: PacelineError, *, is_logged: bool = True) -> PacelineError:
    """The error without its way through this library: for `raise at_the_call(error) from None` in a public call.

    `is_logged` says that another public call below this one has logged it.
    """
    if not is_logged:
        _log.debug("%s: %s", type(error).__name__, error, exc_info=error)
    return error.with_traceback(None)

"""How often the log says that an executor cannot be reached. Refuses to know what is done about it."""

from collections.abc import Callable

import structlog

_LOG_REMINDER_S = 10.0

log = structlog.get_logger(__name__)


class Complaints:
    """Logs that an executor cannot be reached: at once, then now and then, so that the log stays readable."""

    def __init__(self, address: str, clock: Callable[[], float]) -> None:
        self._address = address
        self._clock = clock
        self._reason = ""
        self._num_attempts = 0
        self._logged_s = 0.0

    def note(self, reason: str) -> None:
        """An attempt or a stream ended."""
        self._num_attempts += 1
        now_s = self._clock()
        if reason != self._reason or now_s - self._logged_s >= _LOG_REMINDER_S:
            self._reason, self._logged_s = reason, now_s
            log.warning("executor_unreachable", address=self._address, reason=reason, attempts=self._num_attempts)

    def settle(self) -> None:
        """It is attached: the next failure is news."""
        self._reason, self._num_attempts = "", 0

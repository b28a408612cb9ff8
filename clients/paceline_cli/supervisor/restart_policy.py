"""When to start a process again that ended. Pure: told the time, keeps counts, does nothing."""

from dataclasses import dataclass

FINAL_EXIT_CODES = frozenset({2, 3, 5, *range(64, 79)})
"""No second start makes these better: usage, model and memory (--help of the services explains them), sysexits.h."""
# A port in use and a model that cannot be fetched may be better soon; but whoever waits for the first start, at a
# terminal mostly, is told at once, and what starts `up` itself may start it again.
_ENDS_FIRST_START = FINAL_EXIT_CODES | {4, 7}

_INITIAL_DELAY_SECONDS = 0.1
_MAX_DELAY_SECONDS = 10.0
# A process that ends sooner than this after it became ready has not served anybody.
_SERVED_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class RestartAt:
    """Start it again, not before this time of the caller's clock."""

    seconds: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """It never worked and says why: a wrong option, a missing model, a port in use."""


Verdict = RestartAt | GiveUp


class RestartPolicy:
    """The rule for one process: at once if it had become ready, else with back-off from 0.1 s doubling to 10 s.

    One that ended within a second of becoming ready is started again at once the first time; after that it counts as
    one that failed to start, until it has been ready for longer.
    """

    def __init__(self) -> None:
        self._ready_at_seconds: float | None = None
        self._was_ever_ready = False
        self._has_ended_early = False
        self._num_failed_starts = 0

    def became_ready(self, now_seconds: float) -> None:
        self._ready_at_seconds = now_seconds
        self._was_ever_ready = True

    def exited(self, exit_code: int, now_seconds: float) -> Verdict:
        """A negative code is the signal that killed it."""
        ready_at, self._ready_at_seconds = self._ready_at_seconds, None
        if ready_at is not None:
            had_ended_early = self._has_ended_early
            self._has_ended_early = now_seconds - ready_at < _SERVED_SECONDS
            if not (had_ended_early and self._has_ended_early):
                self._num_failed_starts = 0
                return RestartAt(now_seconds)
        if exit_code in _ENDS_FIRST_START and not self._was_ever_ready:
            return GiveUp()
        self._num_failed_starts += 1
        # 2^7 passes the cap; the bound keeps the power small.
        delay = _INITIAL_DELAY_SECONDS * 2 ** min(self._num_failed_starts - 1, 7)
        return RestartAt(now_seconds + min(delay, _MAX_DELAY_SECONDS))

"""When to dial an executor again, after what ended the last attempt.

Without `jitter`, from [0, 1), two schedulers in step could take executors from each other for ever.
"""

from dataclasses import dataclass

from paceline_scheduler.core.executors import ExecutorDescription

FIRST_DELAY_S = 0.01
REJOIN_DELAY_S = 0.1  # before it queues again
RAISED_DELAY_S = 0.02
MISMATCH_DELAY_S = 2.0  # in a rolling upgrade the executor may soon be another
MIN_STREAM_LIFE_S = 1.0
LOOK_AGAIN_S = 0.1
MAX_ACTING_WAIT_S = 1.0  # to be first at an executor that comes back


def varied(seconds: float, jitter: float) -> float:
    """Varies by a quarter."""
    return seconds * (0.75 + 0.5 * jitter)


@dataclass(slots=True)
class Redial:
    """10 ms, then 100 ms and half as much again each time, at most 5 s.

    An executor waits only 50 ms for a holder whose stream has ended; then a queued scheduler gets it, and this one
    loses all of them.
    """

    at_s: float = float("-inf")
    _next_s: float = FIRST_DELAY_S
    _welcomed_s: float | None = None  # while an accepted stream lasts
    _was_short_lived: bool = False
    _epoch: tuple[int, int] = (0, 0)

    def reset(self) -> None:
        self._next_s = FIRST_DELAY_S

    def welcomed(self, description: ExecutorDescription, now_s: float) -> None:
        """The pauses begin again, unless the last stream was short."""
        if not self._was_short_lived or self._has_failed_a_step(description):
            self.reset()
        self._welcomed_s = now_s
        self._epoch = description.incarnation, description.epoch

    def ended(self, now_s: float) -> bool:
        """Returns whether the stream had been accepted. What ends every stream at once must not be tried ten times a
        second.
        """
        welcomed_s, self._welcomed_s = self._welcomed_s, None
        if welcomed_s is None:
            return False
        self._was_short_lived = now_s - welcomed_s < MIN_STREAM_LIFE_S
        return True

    def after_failure(self, now_s: float, jitter: float, *, is_urgent: bool) -> None:
        wait_s = varied(self._next_s, jitter)
        self._next_s = min(max(self._next_s * 1.5, 0.1), 5.0)
        self.at_s = now_s + (min(wait_s, MAX_ACTING_WAIT_S) if is_urgent else wait_s)

    def after_rise(self, now_s: float, jitter: float) -> None:
        self.at_s = now_s + varied(RAISED_DELAY_S, jitter)

    def after_yielding(self, now_s: float, jitter: float) -> None:
        self.at_s = now_s + varied(REJOIN_DELAY_S, jitter)

    def after_mismatch(self, now_s: float) -> None:
        self.at_s = now_s + MISMATCH_DELAY_S

    def look_again(self, now_s: float, jitter: float) -> None:
        self.at_s = now_s + varied(LOOK_AGAIN_S, jitter)

    def _has_failed_a_step(self, description: ExecutorDescription) -> bool:
        """Its requests are then retried one by one at once. An executor on which all fail ends itself."""
        failed = description.failed_step
        return failed is not None and (description.incarnation, failed.epoch) == self._epoch

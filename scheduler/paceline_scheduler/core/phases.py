"""Where the time of a request goes.

Apart from `live`, because outputs, contexts and answers carry the sums.
"""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple


class Phase(IntEnum):
    """Numbers index `PhaseTimes`."""

    QUEUED = 0
    PREFILL = 1
    DECODE = 2
    PREEMPTED = 3


class PhaseTimes(NamedTuple):
    """Counts from the first submission, over all placements and schedulers."""

    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    preempted_s: float = 0.0

    @property
    def total_s(self) -> float:
        return sum(self)


NO_TIMES = PhaseTimes()


@dataclass(slots=True)
class PhaseClock:
    """`submitted_s` is the first submission, `token_s` when the newest token came. `is_partial`: a former scheduler ran
    the request, and its latest times are not known.
    """

    submitted_s: float
    since_s: float
    phase: Phase | None = Phase.QUEUED  # None: it is over
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0, 0.0])
    first_token_s: float | None = None  # since submission, if that was seen
    token_s: float | None = None
    is_partial: bool = False
    outage_until_s: float | None = None  # no executor is there to begin it, and it ends then

    @classmethod
    def begin(cls, submitted_s: float, *, was_placed: bool = False) -> "PhaseClock":
        """`was_placed`: by an unknown scheduler; all its time counts as without a row."""
        return cls(submitted_s, submitted_s, Phase.PREEMPTED if was_placed else Phase.QUEUED)

    @classmethod
    def inherit(cls, times: PhaseTimes, submitted_s: float, phase: Phase | None, now: float) -> "PhaseClock":
        return cls(submitted_s, now, phase, list(times), is_partial=True)

    def enter(self, phase: Phase, now: float) -> None:
        if self.phase is not None:
            self._add_up(now)
            self.phase = phase

    def leave_row(self, now: float) -> None:
        """A request that was never placed stays queued."""
        if self.phase is not Phase.QUEUED:
            self.enter(Phase.PREEMPTED, now)

    def decode(self, now: float, *, is_first: bool) -> None:
        """`is_first` of all placements; this one may have lost its row since."""
        if self.phase is Phase.PREFILL:
            self.enter(Phase.DECODE, now)
        if is_first and not self.is_partial:
            self.first_token_s = max(0.0, now - self.submitted_s)

    def fill_in(self, waited_s: float, now: float) -> None:
        """The client says how long it `waited_s` since the submission; 0: nothing."""
        if self.is_partial and waited_s and self.phase is not None:
            self._add_up(now)
            self.sums[self.phase] += max(0.0, waited_s - sum(self.sums))
            self.submitted_s, self.is_partial = now - waited_s, False

    def stop(self, now: float) -> None:
        if self.phase is not None:
            self._add_up(now)
            self.phase = None

    def times(self, now: float) -> PhaseTimes:
        sums = list(self.sums)
        if self.phase is not None:
            sums[self.phase] += max(0.0, now - self.since_s)
        return PhaseTimes(*sums)

    def whole_times(self) -> PhaseTimes | None:
        """Returns None if some of its time is not known."""
        return None if self.is_partial else PhaseTimes(*self.sums)

    def _add_up(self, now: float) -> None:
        if self.phase is not None:
            self.sums[self.phase] += max(0.0, now - self.since_s)
            self.since_s = now

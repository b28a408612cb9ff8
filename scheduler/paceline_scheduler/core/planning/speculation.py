"""What drafts have brought on one executor.

Refuses to know what verifying them takes (step_time).
"""

import numpy as np
import numpy.typing as npt

from paceline.plan.values import Int32Array
from paceline_scheduler.core.tables.rows import RowIndex

Float64Array = npt.NDArray[np.float64]

_FIRST = 0.9  # share of right drafts, until a row has seen some
_FIRST_WEIGHT = 2.0  # in drafts
_KEEP = 31 / 32  # of what is known, per step with drafts: a text may change
_KEEP_IDLE = 127 / 128  # per step without: who stopped tries again some time
_GAIN = 1 / 32
_FIRST_ROUNDS = 3  # so many count as if they had taken nothing
_LEAST_ROUND_NS = 1e4
_KEEP_ROUND = 1023 / 1024  # of what a round took, per step without drafts
_PLAIN_EVERY = 32  # steps with drafts
_MAX_SPEEDUP = 64.0


class Acceptance:
    """Shares of right drafts by place decay. A place that was hardly tried counts as good as the one before it."""

    def __init__(self, num_rows: int, max_drafts: int) -> None:
        self._num_tried = np.zeros((num_rows, max_drafts))
        self._num_right = np.zeros((num_rows, max_drafts))

    def begin(self, row: int) -> None:
        self._num_tried[row] = self._num_right[row] = 0.0

    def observe(self, rows: RowIndex, num_verified: Int32Array, num_right: Int32Array) -> None:
        """Drafts behind a wrong one say nothing."""
        place = np.arange(self._num_tried.shape[1])
        keep = np.where(num_verified > 0, _KEEP, _KEEP_IDLE)[:, np.newaxis]
        was_right = place < num_right[:, np.newaxis]
        was_tried = place < np.minimum(num_verified, num_right + 1)[:, np.newaxis]
        self._num_tried[rows] = keep * self._num_tried[rows] + was_tried
        self._num_right[rows] = keep * self._num_right[rows] + was_right

    def survival(self, rows: RowIndex, num_places: int) -> Float64Array:
        """Probability that all drafts up to each place are right: [num_rows, num_places]."""
        survival = np.empty((len(rows), num_places))
        share = np.full(len(rows), _FIRST)
        alive = np.ones(len(rows))
        for place in range(num_places):
            tried, right = self._num_tried[rows, place], self._num_right[rows, place]
            share = (right + _FIRST_WEIGHT * share) / (tried + _FIRST_WEIGHT)
            alive = alive * share
            survival[:, place] = alive
        return survival


class Speculation:
    """`round_ns` is how long the row with the most drafts waits for one more."""

    def __init__(self, num_rows: int, max_drafts: int) -> None:
        self.acceptance = Acceptance(num_rows, max_drafts)
        self.max_drafts = max_drafts
        self.round_ns = 0.0
        self.speedup = 1.0
        self.saved_ns = 0.0
        self._num_drafted = 0  # steps
        self._num_in_a_row = 0  # steps with drafts

    def inherit(self, before: "Speculation") -> None:
        self.round_ns, self.speedup, self.saved_ns = before.round_ns, before.speedup, before.saved_ns

    @property
    def is_plain_due(self) -> bool:
        """Steps without drafts tell what the rest takes."""
        return self._num_in_a_row >= _PLAIN_EVERY

    def planned(self, num_drafts: int) -> None:
        self._num_in_a_row = self._num_in_a_row + 1 if num_drafts else 0
        if not num_drafts:
            self.round_ns *= _KEEP_ROUND

    def observe_drafting(self, num_rounds: int, draft_ns: int) -> None:
        """A step without a round may have brought a drafter up to its rows, and says nothing; one in which it did so
        for some counts at most for twice what was expected.
        """
        if not num_rounds:
            self._num_in_a_row = 0
            return
        self._num_drafted += 1
        error = draft_ns / num_rounds - self.round_ns
        if self._num_drafted > 1:
            error = min(error, max(self.round_ns, _LEAST_ROUND_NS))
        self.round_ns += max(_GAIN, 1 / (self._num_drafted + _FIRST_ROUNDS)) * error

    def observe_speedup(self, tokens_per_row: float, plain_ns: float, busy_ns: float) -> None:
        speedup = min(tokens_per_row * plain_ns / max(busy_ns, 1.0), _MAX_SPEEDUP)
        self.speedup += _GAIN * (speedup - self.speedup)
        self.saved_ns += tokens_per_row * plain_ns - busy_ns

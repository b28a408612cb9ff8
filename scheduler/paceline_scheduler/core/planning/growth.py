"""How many blocks the requests on an executor will need at their worst moment.

A newcomer is admitted only if the blocks suffice for everybody's expected rest, in the order in which they will end:
when the k-th to end does, those that outlive it have grown by as much as it had left (Gong et al., "Past-Future
Scheduler", ASPLOS 2025).
"""

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

_GAIN = 1 / 16
_FIRST_MEAN, _FIRST_DEVIATION = 128.0, 64.0  # tokens, until outputs were seen


class OutputLengths:
    """A running mean and mean deviation (Jacobson 1988, as for round-trip times)."""

    def __init__(self) -> None:
        self.mean = _FIRST_MEAN
        self.deviation = _FIRST_DEVIATION

    def observe(self, num_output_tokens: int) -> None:
        """Requests that ended by themselves only."""
        error = num_output_tokens - self.mean
        self.mean += _GAIN * error
        self.deviation += _GAIN * (abs(error) - self.deviation)

    def expected_rest(self, num_output_tokens: Int64Array, at_most: Int64Array) -> Int64Array:
        """`at_most` bounds each. One that outlived the expectation is expected to go on by the usual deviation."""
        usual, beyond = self._usual_and_beyond()
        rest: Int64Array = np.minimum(np.maximum(usual - num_output_tokens, beyond), at_most)
        return rest

    def expected_rest_of(self, num_output_tokens: int, at_most: int) -> int:
        usual, beyond = self._usual_and_beyond()
        return min(max(usual - num_output_tokens, beyond), at_most)

    def _usual_and_beyond(self) -> tuple[int, int]:
        return int(self.mean + self.deviation), max(1, int(self.deviation))


class Growth:
    def __init__(self, num_slots: int, block_size: int, num_held: Int64Array, rest: Int64Array) -> None:
        """`num_held` are the slots that each request fills by itself, `rest` the tokens it will still add. Slots that
        several share are not in `num_slots`.
        """
        self._num_slots = num_slots
        # The last token of an output needs no slot, and the last block may hold a single token.
        self._num_idle = block_size - 2
        self._num_held = num_held + self._num_idle
        self._rest = rest
        self._num_at_most = int(self._num_held.sum() + rest.sum())  # if nobody ends before the last one
        self._added: list[tuple[int, int]] = []

    def has_room_for(self, num_held: int, rest: int) -> bool:
        newcomer = num_held + self._num_idle, rest
        if self._num_at_most + sum(newcomer) <= self._num_slots:
            return True
        more = np.array([*self._added, newcomer], dtype=np.int64)
        held, left = np.concatenate((self._num_held, more[:, 0])), np.concatenate((self._rest, more[:, 1]))
        order = np.argsort(-left)
        held, left = held[order], left[order]
        at_its_end = np.cumsum(held) + np.arange(1, len(left) + 1) * left
        return int(at_its_end.max()) <= self._num_slots

    def add(self, num_held: int, rest: int) -> None:
        self._added.append((num_held + self._num_idle, rest))
        self._num_at_most += num_held + self._num_idle + rest

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
        usual = int(self.mean + self.deviation)
        beyond = max(1, int(self.deviation))
        rest: Int64Array = np.minimum(np.maximum(usual - num_output_tokens, beyond), at_most)
        return rest


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

    def has_room_for(self, num_held: int, rest: int) -> bool:
        held, left = np.append(self._num_held, num_held + self._num_idle), np.append(self._rest, rest)
        if int(held.sum() + left.sum()) <= self._num_slots:
            return True
        order = np.argsort(-left)
        held, left = held[order], left[order]
        at_its_end = np.cumsum(held) + np.arange(1, len(left) + 1) * left
        return int(at_its_end.max()) <= self._num_slots

    def add(self, num_held: int, rest: int) -> None:
        self._num_held = np.append(self._num_held, num_held + self._num_idle)
        self._rest = np.append(self._rest, rest)


def rest_of(lengths: OutputLengths, num_output_tokens: int, at_most: int) -> int:
    rest = lengths.expected_rest(np.array([num_output_tokens]), np.array([at_most]))
    return int(rest[0])

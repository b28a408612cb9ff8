"""Records: what remains of requests after their release.

A finished request's record goes 60 s after its finish, a preempted one's when it is placed again; both go when they are
forgotten by name, and the oldest go first beyond the limit in bytes. Knows no rows and no clock.
"""

from dataclasses import dataclass

from paceline.plan.values import RecordId, RowState
from paceline_executor.limits import sampling_bytes

_OVERHEAD_BYTES = 1024


@dataclass(frozen=True, slots=True)
class _Record:
    state: RowState
    released_ns: int
    num_bytes: int


class Records:
    """The oldest release is first."""

    def __init__(self, max_bytes: int, keep_ns: int) -> None:
        self._max_bytes = max_bytes
        self._keep_ns = keep_ns
        self._records: dict[RecordId, _Record] = {}
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    @property
    def num_bytes(self) -> int:
        """Returns an estimate."""
        return self._num_bytes

    def states(self) -> tuple[RowState, ...]:
        return tuple(record.state for record in self._records.values())

    def get(self, record_id: RecordId) -> RowState | None:
        record = self._records.get(record_id)
        return None if record is None else record.state

    def add(self, state: RowState, now_ns: int) -> None:
        self._records[state.record_id] = record = _Record(state, now_ns, _size_of(state))
        self._num_bytes += record.num_bytes

    def forget(self, record_id: RecordId) -> None:
        record = self._records.pop(record_id, None)
        if record is not None:
            self._num_bytes -= record.num_bytes

    def trim(self, now_ns: int) -> None:
        """Drops expired ones, and the oldest until the rest fits."""
        gone: list[RecordId] = []
        num_bytes = self._num_bytes
        for record_id, record in self._records.items():
            is_old = now_ns - record.released_ns >= self._keep_ns
            if num_bytes <= self._max_bytes and not is_old:
                break  # the rest is younger
            if num_bytes > self._max_bytes or record.state.released is not None:
                gone.append(record_id)
                num_bytes -= record.num_bytes
        for record_id in gone:
            self.forget(record_id)


def _size_of(state: RowState) -> int:
    arrays = (state.prompt_token_ids, state.output_token_ids, state.block_ids)
    texts = len(state.context) + sampling_bytes(state) + 4 * len(state.end_token_ids)
    logprobs = 0 if state.logprobs is None else state.logprobs.nbytes
    return _OVERHEAD_BYTES + sum(array.nbytes for array in arrays) + texts + logprobs

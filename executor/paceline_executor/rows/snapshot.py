"""A snapshot of rows, records and tags, cut into parts that fit a message.

Sizes are estimates from above.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

from paceline.plan.values import KEY_BYTES, BlockTags, RowState, SnapshotPart
from paceline_executor.limits import sampling_bytes

_STATE_BYTES = 256  # beside its columns, texts and lists
_MIN_COLUMN_BYTES = 4096  # a state is begun in a part only if so much of its columns fits


@dataclass(frozen=True, slots=True)
class RowSnapshot:
    """It is taken at a boundary between two steps."""

    states: tuple[RowState, ...]
    tags: BlockTags


def parts_of(snapshot: RowSnapshot, max_bytes: int) -> Iterator[SnapshotPart]:
    """Of at most `max_bytes`, which is at least 1 MiB, so that any one context fits. The last part holds only their
    number. A request longer than a part goes on in the next.
    """
    num_parts = 1
    for part in chain(_row_parts(snapshot.states, max_bytes), _tag_parts(snapshot.tags, max_bytes)):
        num_parts += 1
        yield part
    yield SnapshotPart(num_parts=num_parts)


def _row_parts(rows: Iterable[RowState], max_bytes: int) -> Iterator[SnapshotPart]:
    states: list[RowState] = []
    num_bytes = 0
    for state in rows:
        rest: RowState | None = state
        while rest is not None:
            room = max_bytes - num_bytes - _fixed_bytes(rest)
            if states and room < min(_MIN_COLUMN_BYTES, _column_bytes(rest)):
                yield SnapshotPart(rows=tuple(states))
                states, num_bytes = [], 0
                continue
            head, rest = _cut(rest, room // 4)
            states.append(head)
            num_bytes += _fixed_bytes(head) + _column_bytes(head)
    if states:
        yield SnapshotPart(rows=tuple(states))


def _cut(state: RowState, num_values: int) -> tuple[RowState, RowState | None]:
    """The state with its first `num_values` column values, and the rest."""
    heads, tails = [], []
    for column in (state.prompt_token_ids, state.output_token_ids, state.block_ids):
        heads.append(column[:num_values])
        tails.append(column[num_values:])
        num_values = max(0, num_values - column.size)
    logprobs, logprobs_left = None, None
    if state.logprobs is not None:
        logprobs, logprobs_left = state.logprobs.split(4 * num_values // state.logprobs.bytes_per_token)
    if not any(tail.size for tail in tails) and not (logprobs_left and logprobs_left.num_tokens):
        return state, None
    head = replace(
        state,
        prompt_token_ids=heads[0],
        output_token_ids=heads[1],
        block_ids=heads[2],
        logprobs=logprobs,
        continues=True,
    )
    rest = RowState(
        record_id=state.record_id,
        row=None,
        attempt=state.attempt,
        prompt_token_ids=tails[0],
        output_token_ids=tails[1],
        num_computed_tokens=0,
        block_ids=tails[2],
        logprobs=logprobs_left,
    )
    return head, rest


def _tag_parts(tags: BlockTags, max_bytes: int) -> Iterator[SnapshotPart]:
    step = (max_bytes - _STATE_BYTES) // (4 + KEY_BYTES)
    for start in range(0, tags.block_ids.size, step):
        keys = tags.keys[start * KEY_BYTES : (start + step) * KEY_BYTES]
        yield SnapshotPart(tags=BlockTags(tags.block_ids[start : start + step], keys))


def _fixed_bytes(state: RowState) -> int:
    names = 4 * (len(state.record_id.tenant) + len(state.record_id.request_id))
    return _STATE_BYTES + names + sampling_bytes(state) + len(state.context) + 5 * len(state.end_token_ids)


def _column_bytes(state: RowState) -> int:
    logprobs = 0 if state.logprobs is None else state.logprobs.nbytes
    return state.prompt_token_ids.nbytes + state.output_token_ids.nbytes + state.block_ids.nbytes + logprobs

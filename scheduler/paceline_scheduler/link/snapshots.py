"""Joins the parts of a snapshot. Knows how a request is continued from one part to the next; decides nothing."""

from dataclasses import replace
from itertools import pairwise

import numpy as np

from paceline.plan.values import BlockTags, LogprobColumns, RowState, SnapshotPart, joined
from paceline_scheduler.core.executors import SeenRow, Snapshot
from paceline_scheduler.errors import DivergenceError
from paceline_scheduler.link.wire_contexts import read_context

MAX_PARTS = 4096


class SnapshotJoiner:
    """Collects parts until the last one came."""

    def __init__(self) -> None:
        self._num_parts = 0
        self._rows: list[RowState] = []
        self._pieces: list[RowState] = []  # of the request that is not complete yet
        self._tags: list[BlockTags] = []

    def add(self, part: SnapshotPart) -> Snapshot | None:
        """Take a part; returns the snapshot when it was the last one."""
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise DivergenceError(f"the snapshot has more than {MAX_PARTS} parts")
        for piece in part.rows:
            self._pieces.append(piece)
            if not piece.continues:
                self._rows.append(_join(self._pieces))
                self._pieces = []
        self._tags.append(part.tags)
        if not part.last:
            return None
        if self._pieces:
            raise DivergenceError("the snapshot ended inside a request")
        tags = BlockTags(
            np.concatenate([tags.block_ids for tags in self._tags]), b"".join(tags.keys for tags in self._tags)
        )
        return Snapshot(tuple(SeenRow.of(row, read_context(row.record_id, row.context)) for row in self._rows), tags)


def _join(pieces: list[RowState]) -> RowState:
    """Return one request out of its pieces: columns one after another, everything else from the first."""
    first = pieces[0]
    if len(pieces) == 1:
        return first
    if any(piece.record_id != first.record_id for piece in pieces):
        raise DivergenceError(f"the snapshot continues {first.record_id} with another request")
    return replace(
        first,
        prompt_token_ids=np.concatenate([piece.prompt_token_ids for piece in pieces]),
        output_token_ids=np.concatenate([piece.output_token_ids for piece in pieces]),
        block_ids=np.concatenate([piece.block_ids for piece in pieces]),
        logprobs=_join_logprobs([piece.logprobs for piece in pieces if piece.logprobs is not None]),
        continues=False,
    )


def _join_logprobs(pieces: list[LogprobColumns]) -> LogprobColumns | None:
    if not pieces:
        return None
    for before, after in pairwise(pieces):
        if after.offset != before.end or after.num_top != before.num_top:
            raise DivergenceError("the log-probabilities of a request in the snapshot do not follow one another")
    return joined(pieces)

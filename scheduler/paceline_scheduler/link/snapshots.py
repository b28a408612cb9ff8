"""Joins the parts of a snapshot. Knows how a request is continued from one part to the next; decides nothing."""

from dataclasses import replace
from itertools import pairwise

import numpy as np

from paceline_scheduler.core.executors import RowState, Snapshot
from paceline_scheduler.core.logprobs import LogprobColumns
from paceline_scheduler.core.plan import BlockTag
from paceline_scheduler.errors import DivergenceError
from paceline_scheduler.link.messages import SnapshotPart

MAX_PARTS = 4096


class SnapshotJoiner:
    """Collects parts until the last one came."""

    def __init__(self) -> None:
        self._num_parts = 0
        self._rows: list[RowState] = []
        self._pieces: list[RowState] = []  # of the request that is not complete yet
        self._tags: list[BlockTag] = []

    def add(self, part: SnapshotPart) -> Snapshot | None:
        """Take a part; returns the snapshot when it was the last one."""
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise DivergenceError(f"the snapshot has more than {MAX_PARTS} parts")
        for row_part in part.rows:
            self._pieces.append(row_part.row)
            if not row_part.is_continued:
                self._rows.append(_join(self._pieces))
                self._pieces = []
        self._tags.extend(part.tags)
        if not part.is_last:
            return None
        if self._pieces:
            raise DivergenceError("the snapshot ended inside a request")
        return Snapshot(tuple(self._rows), tuple(self._tags))


def _join(pieces: list[RowState]) -> RowState:
    """Return one request out of its pieces: columns one after another, everything else from the first."""
    first = pieces[0]
    if len(pieces) == 1:
        return first
    if any(piece.key != first.key for piece in pieces):
        raise DivergenceError(f"the snapshot continues {first.key} with another request")
    return replace(
        first,
        prompt_token_ids=np.concatenate([piece.prompt_token_ids for piece in pieces]),
        output_token_ids=np.concatenate([piece.output_token_ids for piece in pieces]),
        block_ids=np.concatenate([piece.block_ids for piece in pieces]),
        logprobs=_join_logprobs([piece.logprobs for piece in pieces if piece.logprobs is not None]),
    )


def _join_logprobs(pieces: list[LogprobColumns]) -> LogprobColumns | None:
    if not pieces:
        return None
    first = pieces[0]
    for before, after in pairwise(pieces):
        if after.offset != before.end or after.top_token_ids.shape[1] != first.top_token_ids.shape[1]:
            raise DivergenceError("the log-probabilities of a request in the snapshot do not follow one another")
    return LogprobColumns(
        offset=first.offset,
        logprobs=np.concatenate([piece.logprobs for piece in pieces]),
        top_token_ids=np.concatenate([piece.top_token_ids for piece in pieces]),
        top_logprobs=np.concatenate([piece.top_logprobs for piece in pieces]),
    )

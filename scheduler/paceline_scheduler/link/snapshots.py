"""Joins the parts of a snapshot, and checks it against what the executor says it is.

What comes out fits the tables that the core makes.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np

from paceline.plan.values import (
    KEY_BYTES,
    BlockTags,
    Int32Array,
    LogprobColumns,
    RecordId,
    RowState,
    SnapshotPart,
    Welcome,
    joined,
)
from paceline_scheduler.core.executors import SeenRow, Snapshot
from paceline_scheduler.errors import DivergenceError
from paceline_scheduler.link.wire_contexts import read_context

MAX_PARTS = 4096
MAX_SNAPSHOT_BYTES = 512 * 1024 * 1024
"""Counts `_STATE_BYTES` for each row and record."""

MAX_TABLE_TOKENS = 1 << 32
"""Only as many as are known take memory."""

_STATE_BYTES = 1024


class SnapshotJoiner:
    def __init__(self, welcome: Welcome) -> None:
        self._sizes = _Sizes(welcome)
        self._num_parts = 0
        self._num_bytes = 0
        self._rows: list[SeenRow] = []
        self._pieces: list[RowState] = []  # of an incomplete request
        self._tags: list[BlockTags] = []

    def add(self, part: SnapshotPart) -> Snapshot | None:
        """Returns the snapshot after the last part. Raises DivergenceError."""
        self._count(part)
        for piece in part.rows:
            self._pieces.append(piece)
            if not piece.continues:
                row, self._pieces = _join(self._pieces), []
                self._sizes.check_row(row)
                self._rows.append(SeenRow.of(row, *read_context(row.record_id, row.context)))
        self._sizes.check_blocks("a tag", part.tags.block_ids)
        self._tags.append(part.tags)
        if not part.num_parts:
            return None
        if part.num_parts != self._num_parts:
            raise DivergenceError(f"the snapshot has {self._num_parts} parts and says {part.num_parts}")
        if self._pieces:
            raise DivergenceError("the snapshot ended inside a request")
        tags = BlockTags(
            np.concatenate([tags.block_ids for tags in self._tags]), b"".join(tags.keys for tags in self._tags)
        )
        return Snapshot(tuple(self._rows), tags)

    def _count(self, part: SnapshotPart) -> None:
        self._num_parts += 1
        self._num_bytes += sum(map(_num_bytes, part.rows)) + (4 + KEY_BYTES) * len(part.tags.block_ids)
        if self._num_parts > MAX_PARTS:
            raise DivergenceError(f"the snapshot has more than {MAX_PARTS} parts")
        if self._num_bytes > MAX_SNAPSHOT_BYTES:
            raise DivergenceError(f"the snapshot has more than {MAX_SNAPSHOT_BYTES} bytes")


class _Sizes:
    """Keeps what was seen: nothing may repeat it."""

    def __init__(self, welcome: Welcome) -> None:
        """Raises DivergenceError for too large tables."""
        num_tokens = welcome.limits.max_num_rows * welcome.limits.max_model_len
        if num_tokens > MAX_TABLE_TOKENS:
            raise DivergenceError(f"rows of {num_tokens} tokens in all are more than {MAX_TABLE_TOKENS}")
        self._num_rows = welcome.limits.max_num_rows
        self._max_model_len = welcome.limits.max_model_len
        self._num_blocks = welcome.geometry.num_blocks
        self._block_size = welcome.geometry.block_size
        self._vocab_size = welcome.model.vocab_size
        self._rows: set[int] = set()
        self._record_ids: set[RecordId] = set()

    def check_row(self, state: RowState) -> None:
        """Raises DivergenceError for an impossible or repeated one."""
        if state.row is not None:
            _require(state.row < self._num_rows, f"row {state.row} of {self._num_rows}")
            _require(state.row not in self._rows, f"row {state.row} twice")
            self._rows.add(state.row)
        _require(state.record_id not in self._record_ids, "a request twice")
        self._record_ids.add(state.record_id)
        num_output = len(state.output_token_ids)
        num_known = len(state.prompt_token_ids) + num_output
        _require(num_known <= self._max_model_len, f"{num_known} tokens of a row in {self._max_model_len}")
        _require(state.num_computed_tokens <= num_known, f"{state.num_computed_tokens} of {num_known} tokens computed")
        self._check_tokens(state.output_token_ids)
        self._check_table(state)
        if state.released is not None:
            _require(state.released.num_output_tokens <= num_output, "a release beyond the output")
        if state.logprobs is not None:
            _require(state.logprobs.end == num_output, "log-probabilities of other tokens than the output's")
            self._check_tokens(state.logprobs.top_token_ids)

    def check_blocks(self, what: str, block_ids: Int32Array) -> None:
        """Raises DivergenceError for an unknown block."""
        if len(block_ids) and int(block_ids.max()) >= self._num_blocks:
            raise DivergenceError(f"the snapshot has {what} of block {block_ids.max()} of {self._num_blocks}")

    def _check_table(self, state: RowState) -> None:
        num_blocks, num_computed = len(state.block_ids), state.num_computed_tokens
        self.check_blocks("a table", state.block_ids)
        _require(num_blocks <= -(-self._max_model_len // self._block_size), f"a table of {num_blocks} blocks")
        _require(len(np.unique(state.block_ids)) == num_blocks, "a block twice in a table")
        if state.row is not None:
            _require(num_computed <= num_blocks * self._block_size, f"{num_computed} tokens in {num_blocks} blocks")

    def _check_tokens(self, token_ids: Int32Array) -> None:
        if token_ids.size and int(token_ids.max()) >= self._vocab_size:
            raise DivergenceError(f"the snapshot has token {token_ids.max()} of {self._vocab_size}")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise DivergenceError(f"the snapshot has {otherwise}")


def _num_bytes(state: RowState) -> int:
    logprobs = 0 if state.logprobs is None else state.logprobs.nbytes
    columns = (state.prompt_token_ids, state.output_token_ids, state.block_ids)
    return _STATE_BYTES + sum(column.nbytes for column in columns) + len(state.context) + logprobs


def _join(pieces: list[RowState]) -> RowState:
    """Columns come one after another, the rest from the first piece."""
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

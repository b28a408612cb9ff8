"""Block tables: which block is in which cell, and how many cells hold each block.

The scheduler alone decides who gets a block. Two mistakes are checked that would let one request write over another's
tokens: a block granted for writing while a table still holds it, and a cell out of line.
"""

from functools import partial

import numpy as np
import numpy.typing as npt

from paceline.plan.values import NO_COPIES, BlockCopies, BlockGrants
from paceline_executor.errors import PlanError, PlanFault
from paceline_executor.rows.columns import NO_BLOCK, RowArrays
from paceline_executor.rows.undo import Undo
from paceline_executor.runner.interface import Int32Array


class BlockTables:
    """Keeps a count of holders per block in step."""

    def __init__(self, columns: RowArrays, num_blocks: int) -> None:
        self._columns = columns
        self._num_holders = np.zeros(num_blocks, dtype=np.int32)

    @property
    def num_granted(self) -> int:
        return int((self._num_holders > 0).sum())

    def blocks_of(self, row: int) -> Int32Array:
        return self._columns.block_table[row, : self._columns.num_blocks[row]].copy()

    def put(self, grants: BlockGrants, shared: BlockGrants, copies: BlockCopies, undo: Undo) -> None:
        """`grants` are to write to, `shared` to read only. Columns are in range, rows in use. Raises PlanError for a
        writable block that is in a table already or shared, a block or cell granted twice, a block that replaces
        computed tokens without being a copy, and a gap in a table.
        """
        if grants.rows.size:
            self._keep_contents(grants, copies)
            self._grant(grants, undo)
        if shared.rows.size:
            self._keep_contents(shared, NO_COPIES)
            self._check_shared(grants, shared)
            self._share(shared, undo)
        for given in (grants, shared):
            # Cells are distinct and tables had no gaps: below the new count there are none now.
            beyond = given.rows[given.indices >= self._columns.num_blocks[given.rows]]
            if beyond.size:
                raise PlanError(PlanFault.BLOCK_INDEX, f"the grants leave a gap in the block table of row {beyond[0]}")

    def drop(self, row: int, undo: Undo) -> None:
        """The caller clears the table when the step has landed."""
        blocks = self.blocks_of(row)
        self._count(blocks, -1)
        undo.add(partial(self._count, blocks, 1))

    def cut_before(self, block_ids: Int32Array) -> None:
        """The contents of these blocks are gone. No step is in flight."""
        columns = self._columns
        for row in np.flatnonzero(columns.in_use):
            hits = np.flatnonzero(np.isin(self.blocks_of(row), block_ids))
            if hits.size:
                self._cut(int(row), int(hits[0]))

    def _cut(self, row: int, num_blocks: int) -> None:
        columns = self._columns
        self._count(columns.block_table[row, num_blocks : columns.num_blocks[row]], -1)
        columns.block_table[row, num_blocks:] = NO_BLOCK
        columns.num_blocks[row] = num_blocks
        columns.num_shared[row] = min(columns.num_shared[row], num_blocks)
        num_computed = min(columns.num_computed[row], num_blocks * columns.block_size)
        columns.num_computed[row] = columns.computed_bound[row] = num_computed
        columns.is_told[row] = False

    def _keep_contents(self, grants: BlockGrants, copies: BlockCopies) -> None:
        """Only a copy may replace a block with computed tokens."""
        columns, rows = self._columns, grants.rows
        before = columns.block_table[rows, grants.indices]
        starts = grants.indices.astype(np.int64) * columns.block_size
        is_lost = (before != NO_BLOCK) & (starts < columns.computed_bound[rows])
        if not is_lost.any():
            return
        copied = set(zip(copies.sources.tolist(), copies.destinations.tolist(), strict=True))
        cells = (rows[is_lost], before[is_lost], grants.block_ids[is_lost])
        for row, old, new in zip(*(column.tolist() for column in cells), strict=True):
            if (old, new) not in copied:
                sentence = f"block {new} takes the place of block {old} with computed tokens of row {row}"
                raise PlanError(PlanFault.CONTENTS_LOST, f"{sentence} and is no copy of it")

    def _grant(self, grants: BlockGrants, undo: Undo) -> None:
        held = grants.block_ids[self._num_holders[grants.block_ids] > 0]
        if held.size:
            raise PlanError(PlanFault.BLOCK_IN_USE, f"block {held[0]} is granted while a block table holds it")
        twice = _first_repeated(grants.block_ids)
        if twice is not None:
            raise PlanError(PlanFault.BLOCK_IN_USE, f"block {twice} is granted twice in one plan")
        replaced = self._fill(grants, undo)
        self._make_writable(grants, replaced, undo)

    def _check_shared(self, grants: BlockGrants, shared: BlockGrants) -> None:
        both = shared.block_ids[np.isin(shared.block_ids, grants.block_ids)] if grants.rows.size else shared.rows[:0]
        if both.size:
            raise PlanError(PlanFault.BLOCK_IN_USE, f"block {both[0]} is granted and shared in one plan")

    def _share(self, shared: BlockGrants, undo: Undo) -> None:
        self._fill(shared, undo)
        num_shared = self._columns.num_shared
        before = num_shared[shared.rows]
        undo.add(partial(num_shared.__setitem__, shared.rows, before))
        np.maximum.at(num_shared, shared.rows, shared.indices + 1)

    def _fill(self, grants: BlockGrants, undo: Undo) -> npt.NDArray[np.bool_]:
        """Returns which cells held a block before."""
        table, num_blocks = self._columns.block_table, self._columns.num_blocks
        told_blocks = self._columns.told_blocks
        rows, indices, blocks = grants.rows, grants.indices, grants.block_ids
        if _first_repeated(rows.astype(np.int64) * table.shape[1] + indices) is not None:
            raise PlanError(PlanFault.BLOCK_INDEX, "one cell of a block table is granted twice in one plan")
        cells_before, counts_before = table[rows, indices], num_blocks[rows]
        replaced: npt.NDArray[np.bool_] = cells_before != NO_BLOCK

        def restore() -> None:
            table[rows, indices] = cells_before
            num_blocks[rows] = counts_before
            told_blocks[rows] = np.minimum(told_blocks[rows], counts_before)
            self._count(blocks, -1)
            self._count(cells_before[replaced], 1)

        undo.add(restore)
        table[rows, indices] = blocks
        np.minimum.at(told_blocks, rows[replaced], indices[replaced])
        np.add.at(num_blocks, rows[~replaced], 1)
        self._count(cells_before[replaced], -1)
        self._count(blocks, 1)
        return replaced

    def _make_writable(self, grants: BlockGrants, replaced: npt.NDArray[np.bool_], undo: Undo) -> None:
        """A private block in place of the last shared one ends the shared part before it."""
        num_shared = self._columns.num_shared
        cells = zip(grants.rows[replaced].tolist(), grants.indices[replaced].tolist(), strict=True)
        for row, index in sorted(cells, reverse=True):
            if index == num_shared[row] - 1:
                undo.add(partial(num_shared.__setitem__, row, index + 1))
                num_shared[row] = index

    def _count(self, block_ids: Int32Array, change: int) -> None:
        np.add.at(self._num_holders, block_ids, change)


def _first_repeated(values: npt.NDArray[np.integer]) -> int | None:
    ordered = np.sort(values)
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    return int(repeated[0]) if repeated.size else None

"""The prefix-cache keys of blocks, kept for the scheduler and never read."""

import numpy as np

from paceline.plan.values import KEY_BYTES, BlockTags
from paceline_executor.rows.undo import Undo
from paceline_executor.runner.interface import Int32Array


class TagBoard:
    """A block has 16 bytes; zeros mean that it carries none."""

    def __init__(self, num_blocks: int) -> None:
        self._keys = np.zeros((num_blocks, KEY_BYTES // 8), dtype=np.uint64)

    @property
    def num_tagged(self) -> int:
        return int(self._keys.any(axis=1).sum())

    def put(self, tags: BlockTags, undo: Undo) -> None:
        """Columns are checked. Of two keys for one block the later one stays."""
        self._write(tags.block_ids, np.frombuffer(tags.keys, dtype=np.uint64).reshape(-1, KEY_BYTES // 8), undo)

    def clear(self, block_ids: Int32Array, undo: Undo) -> None:
        """The blocks will be written to."""
        self._write(block_ids, np.zeros((block_ids.size, KEY_BYTES // 8), dtype=np.uint64), undo)

    def clear_all(self) -> None:
        self._keys[:] = 0

    def tags(self) -> BlockTags:
        """They are in the order of block ids."""
        block_ids = np.flatnonzero(self._keys.any(axis=1)).astype(np.int32)
        return BlockTags(block_ids, self._keys[block_ids].tobytes())

    def _write(self, block_ids: Int32Array, keys: np.ndarray[tuple[int, ...], np.dtype[np.uint64]], undo: Undo) -> None:
        if not block_ids.size:
            return
        before = self._keys[block_ids]
        self._keys[block_ids] = keys

        def restore() -> None:
            self._keys[block_ids] = before

        undo.add(restore)

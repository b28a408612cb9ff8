"""The KV cache of a simulated executor: token ids in slots, block tables, tags.

Knows what each slot holds and who may write it. Refuses to know steps, finishes and records.
"""

from dataclasses import dataclass, field

import numpy as np

from paceline.plan.values import KEY_BYTES, NO_KEY, BlockTags, Int32Array
from paceline_scheduler.simulator.violations import require

POISON = -1  # a slot that was not written since its block was granted


@dataclass(slots=True)
class BlockTable:
    """The blocks of one row in order; `read_only` are the indices of shared ones."""

    row: int
    tenant: str
    block_ids: list[int] = field(default_factory=list)
    read_only: set[int] = field(default_factory=set)

    def place(self, index: int, block: int) -> int | None:
        """Put a block at an index; returns the block that stood there."""
        require(index <= len(self.block_ids), "a block table has no holes", f"row {self.row}, index {index}")
        if index == len(self.block_ids):
            self.block_ids.append(block)
            return None
        replaced, self.block_ids[index] = self.block_ids[index], block
        self.read_only.discard(index)
        return replaced


@dataclass(frozen=True, slots=True)
class _Tag:
    key: bytes
    tenant: str


class SimulatedBlocks:
    """All blocks of an executor. Every method raises PlanViolationError when a rule is broken."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots: Int32Array = np.full((num_blocks, block_size), POISON, dtype=np.int32)
        self._num_owners = [0] * num_blocks
        self._tags: dict[int, _Tag] = {}
        self._contents: dict[bytes, tuple[int, ...]] = {}  # what each key stood for so far

    @property
    def num_blocks(self) -> int:
        """How many blocks there are."""
        return len(self._num_owners)

    @property
    def num_owned(self) -> int:
        """How many blocks are in some block table."""
        return sum(1 for count in self._num_owners if count)

    def is_full(self, block: int) -> bool:
        """Tell whether every slot of a block holds a token."""
        self._require_block(block)
        return POISON not in self.slots[block]

    def tags(self) -> BlockTags:
        """Return the prefix-cache keys of all blocks, by block."""
        return BlockTags.of((block, tag.key) for block, tag in sorted(self._tags.items()))

    def tag(self, block: int, key: bytes, tenant: str | None) -> None:
        """Name a full block for the prefix cache; a key of zeros removes the tag. `tenant` owns the block."""
        self._require_block(block)
        require(len(key) == KEY_BYTES, "a key has 16 bytes", f"block {block}")
        if key == NO_KEY:
            self._tags.pop(block, None)
            return
        require(self.is_full(block), "tag of an unfilled block", f"block {block}")
        require(tenant is not None, "tag of a released block", f"block {block}")
        content = tuple(self.slots[block].tolist())
        require(self._contents.setdefault(key, content) == content, "one key for two contents", f"block {block}")
        self._tags[block] = _Tag(key, tenant or "")

    def grant(self, table: BlockTable, index: int, block: int) -> None:
        """Give a block to a row to write into; what it held is gone."""
        self._require_block(block)
        require(self._num_owners[block] == 0, "grant of a block in use", f"block {block} to row {table.row}")
        self._tags.pop(block, None)
        self.slots[block] = POISON
        self._take(table, index, block)

    def share(self, table: BlockTable, index: int, block: int) -> None:
        """Give a tagged block to a row to read from."""
        self._require_block(block)
        tag = self._tags.get(block)
        require(tag is not None, "share of a block without a tag", f"block {block} to row {table.row}")
        require(tag is not None and tag.tenant == table.tenant, "share across tenants", f"block {block}")
        require(self.is_full(block), "share of an unfilled block", f"block {block} to row {table.row}")
        self._take(table, index, block)
        table.read_only.add(index)

    def release(self, table: BlockTable) -> None:
        """Take a row's blocks back; what they hold stays until they are granted again."""
        for block in table.block_ids:
            self._num_owners[block] -= 1
        table.block_ids.clear()
        table.read_only.clear()

    def spoil(self, block: int) -> None:
        """Let a step that failed have written to a block: nobody knows what it holds."""
        self._tags.pop(block, None)
        self.slots[block] = POISON

    def cut(self, table: BlockTable, num_blocks: int) -> None:
        """Take the last blocks of a table back."""
        for block in table.block_ids[num_blocks:]:
            self._num_owners[block] -= 1
        del table.block_ids[num_blocks:]
        table.read_only = {index for index in table.read_only if index < num_blocks}

    def write(self, table: BlockTable, start: int, token_ids: Int32Array) -> None:
        """Write tokens to the positions from `start` on."""
        for position, token in enumerate(token_ids.tolist(), start):
            index, slot = divmod(position, self.block_size)
            where = f"row {table.row}, position {position}"
            require(index < len(table.block_ids), "write to a block that was not granted", where)
            require(index not in table.read_only, "write to a shared block", where)
            block = table.block_ids[index]
            require(block not in self._tags, "write to a tagged block", f"{where}, block {block}")
            self.slots[block, slot] = token

    def read(self, table: BlockTable, num_tokens: int) -> Int32Array:
        """Return the tokens of the first positions, as the block table leads to them."""
        num_blocks = -(-num_tokens // self.block_size)
        require(num_blocks <= len(table.block_ids), "read beyond the block table", f"row {table.row}")
        read: Int32Array = self.slots[table.block_ids[:num_blocks]].reshape(-1)[:num_tokens]
        require(POISON not in read, "read of an unwritten slot", f"row {table.row}")
        return read

    def _take(self, table: BlockTable, index: int, block: int) -> None:
        self._num_owners[block] += 1
        replaced = table.place(index, block)
        if replaced is not None:
            self._num_owners[replaced] -= 1

    def _require_block(self, block: int) -> None:
        require(0 <= block < self.num_blocks, "a block that does not exist", f"block {block}")

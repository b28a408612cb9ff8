"""The KV blocks of one executor: who owns each, which can be hit, which are free.

Knows block ids, reference counts and opaque keys. Refuses to know requests, tokens and how keys are made.

A block is exactly one of: free (nothing in it), cached (owned by nobody, has a key, can be hit or evicted) or used
(reference count above 0).
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.plan.values import Int32Array


@dataclass(frozen=True, slots=True)
class BlockCounts:
    total: int
    free: int
    cached: int
    used: int


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # There may be millions of blocks.
        self._ref_counts = array("i", bytes(4 * num_blocks))
        self._free = _ids(np.arange(num_blocks - 1, -1, -1, dtype=np.int32))  # low ids first
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._keys: dict[int, bytes] = {}
        self._blocks_by_key: dict[bytes, int] = {}

    @property
    def num_available(self) -> int:
        """Includes cached ones that can be evicted."""
        return len(self._free) + len(self._cached)

    def allocate(self, num_blocks: int) -> list[int]:
        """Returns blocks with a reference count of 1 and no key; evicts the least recently used."""
        assert num_blocks <= self.num_available, "the planner grants only what is available"
        num_free = min(num_blocks, len(self._free))
        granted = self._free[-1 : -num_free - 1 : -1].tolist()
        del self._free[len(self._free) - num_free :]
        granted += [self._evict() for _ in range(num_blocks - num_free)]
        for block in granted:
            self._ref_counts[block] = 1
        return granted

    def share(self, block: int) -> None:
        assert block in self._keys, "only tagged blocks are shared"
        if self._ref_counts[block] == 0:
            del self._cached[block]
        self._ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Takes one owner from each; the end of the table is evicted first."""
        for block in reversed(blocks):
            assert self._ref_counts[block] > 0, "a block is released once per owner"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._retire(block)

    def tag(self, block: int, key: bytes) -> bool:
        """Returns False when the key is taken, or the block has one."""
        if key in self._blocks_by_key or block in self._keys:
            return False
        assert self._ref_counts[block] > 0, "only owned blocks are tagged"
        self._remember(block, key)
        return True

    def untag(self, blocks: Iterable[int]) -> list[int]:
        """Returns those that had a key."""
        tagged = [block for block in blocks if block in self._keys]
        for block in tagged:
            assert self._ref_counts[block] > 0, "what is cached has a key"
            del self._blocks_by_key[self._keys.pop(block)]
        return tagged

    def find(self, key: bytes) -> int | None:
        return self._blocks_by_key.get(key)

    def is_cached(self, block: int) -> bool:
        return block in self._cached

    def num_freed_by(self, blocks: Iterable[int]) -> int:
        return sum(1 for block in blocks if self._ref_counts[block] == 1)

    def counts(self) -> BlockCounts:
        used = self.num_blocks - len(self._free) - len(self._cached)
        return BlockCounts(self.num_blocks, len(self._free), len(self._cached), used)

    def adopt(self, blocks: Iterable[int]) -> None:
        """Each block gains an owner."""
        for block in blocks:
            self._ref_counts[block] += 1

    def rebuild(self, tags: Iterable[tuple[int, bytes]]) -> None:
        """Call it after all tables were adopted."""
        for block, key in tags:
            if key not in self._blocks_by_key and block not in self._keys:
                self._remember(block, key)
        is_free = np.frombuffer(self._ref_counts, np.int32) == 0
        is_free[list(self._keys)] = False
        self._free = _ids(np.flatnonzero(is_free)[::-1])
        self._cached = OrderedDict((b, None) for b in sorted(self._keys) if not self._ref_counts[b])

    def keys(self) -> Iterable[bytes]:
        return self._blocks_by_key

    def rename(self, keys: Mapping[bytes, bytes]) -> None:
        """Put other keys in the place of some; no two become one."""
        self._keys = {block: keys.get(key, key) for block, key in self._keys.items()}
        self._blocks_by_key = {key: block for block, key in self._keys.items()}

    def without_index(self) -> "BlockPool":
        """Return a copy that finds no keys before `rename`, and shares all the rest."""
        copied = copy(self)
        vars(copied)["_blocks_by_key"] = {}
        return copied

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Asserts that every block's owners are counted; for tests and idle moments."""
        owners = [0] * self.num_blocks
        for table in tables:
            for block in table:
                owners[block] += 1
        assert owners == self._ref_counts.tolist(), "a block's reference count is the number of its owners"
        used = {block for block, count in enumerate(owners) if count}
        groups = (set(self._free), set(self._cached), used)
        assert sum(map(len, groups)) == len(set().union(*groups)) == self.num_blocks, "every block is in one state"
        assert len(self._free) == len(groups[0]), "no block is free twice"
        assert set(self._cached) <= self._keys.keys(), "what is cached has a key"
        assert {key: block for block, key in self._keys.items()} == self._blocks_by_key, "keys and blocks agree"

    def _remember(self, block: int, key: bytes) -> None:
        self._keys[block] = key
        self._blocks_by_key[key] = block

    def _retire(self, block: int) -> None:
        if block in self._keys:
            self._cached[block] = None
        else:
            self._free.append(block)

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        del self._blocks_by_key[self._keys.pop(block)]
        return block


def _ids(blocks: npt.NDArray[np.intp] | Int32Array) -> "array[int]":
    return array("i", blocks.astype(np.int32, copy=False).tobytes())

"""The block pool against a simple model: conservation, reference counts, least recently used eviction."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline_scheduler.core.tables.blocks import BlockPool

NUM_BLOCKS = 8


class BlockPoolMachine(RuleBasedStateMachine):
    """Tables that own blocks, and a list that remembers in which order blocks were let go."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.tables: list[list[int]] = []
        self.keys: dict[int, bytes] = {}
        self.let_go: list[int] = []  # cached blocks, oldest first
        self.num_keys = 0

    @property
    def owned(self):
        return {block for table in self.tables for block in table}

    @rule(count=st.integers(1, NUM_BLOCKS))
    def allocate(self, count):
        """A new table takes fresh blocks; free ones go first, then the one let go longest ago."""
        if count > self.pool.num_available:
            return
        free = set(range(NUM_BLOCKS)) - self.owned - self.keys.keys()
        table = self.pool.allocate(count)
        evicted = self.let_go[: max(0, count - len(free))]
        assert set(table) - free == set(evicted)
        for block in evicted:
            self.let_go.remove(block)
            del self.keys[block]
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def tag(self, data):
        """A block in a table gets a key of its own."""
        block = data.draw(st.sampled_from(data.draw(st.sampled_from(self.tables))))
        self.num_keys += 1
        key = self.num_keys.to_bytes(16, "little")
        assert self.pool.tag(block, key) == (block not in self.keys)
        self.keys.setdefault(block, key)

    @precondition(lambda self: self.keys)
    @rule(data=st.data())
    def hit(self, data):
        """A new table shares a block that is found by its key."""
        block = data.draw(st.sampled_from(sorted(self.keys)))
        assert self.pool.find(self.keys[block]) == block
        self.pool.share(block)
        if block in self.let_go:
            self.let_go.remove(block)
        self.tables.append([block])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data):
        """A table lets go of its blocks; the end of a table is evicted before its beginning."""
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        self.let_go += [block for block in reversed(table) if block in self.keys and block not in self.owned]

    @invariant()
    def every_block_is_in_one_state(self):
        """I1: free + cached + used = total, by count and block by block."""
        self.pool.check(self.tables)
        counts = self.pool.counts()
        assert counts.free + counts.cached + counts.used == counts.total == NUM_BLOCKS
        assert counts.used == len(self.owned)
        assert counts.cached == len(self.let_go)


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(stateful_step_count=40)


def test_a_key_belongs_to_one_block():
    """Two requests that computed the same prefix at the same time: the second block stays untagged."""
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    assert pool.tag(first, b"k" * 16)
    assert not pool.tag(second, b"k" * 16)
    assert pool.find(b"k" * 16) == first


def test_a_rebuilt_pool_knows_tables_and_tags_of_the_snapshot():
    pool = BlockPool(5)
    pool.adopt([0, 1])
    pool.adopt([0, 2])
    pool.rebuild([(0, b"a" * 16), (4, b"b" * 16)])
    pool.check([[0, 1], [0, 2]])
    counts = pool.counts()
    assert (counts.used, counts.cached, counts.free) == (3, 1, 1)
    assert pool.find(b"b" * 16) == 4

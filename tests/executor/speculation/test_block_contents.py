"""What a drafter's blocks hold: a slot counts for a row if it was computed behind the row's own tokens."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_executor.speculation.block_contents import BlockContents
from paceline_executor.testing.plans import int32

NUM_BLOCKS, BLOCK_SIZE, MAX_LEN = 6, 3, 15


class Reference:
    """Every slot with all tokens up to its own, in no hash."""

    def __init__(self):
        self.slots = {}

    def num_held(self, tokens, table):
        """How many leading tokens were computed in these blocks, behind one another."""
        held = 0
        while held < len(tokens):
            slot = (table[held // BLOCK_SIZE], held % BLOCK_SIZE)
            if self.slots.get(slot) != tuple(tokens[: held + 1]):
                break
            held += 1
        return held

    def put(self, tokens, start, table):
        """Compute tokens from `start` on; what lay behind them in the last block is gone."""
        for place in range(start, -(-len(tokens) // BLOCK_SIZE) * BLOCK_SIZE):
            slot = (table[place // BLOCK_SIZE], place % BLOCK_SIZE)
            self.slots[slot] = tuple(tokens[: place + 1]) if place < len(tokens) else None


# Of two tokens, so that blocks are alike whose beginnings are not.
rows = st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=MAX_LEN), st.permutations(range(NUM_BLOCKS)))


@pytest.mark.hypothesis
def test_what_is_held_is_what_was_computed_behind_the_same_tokens():
    """However blocks change hands: rows begin, go on, go back and share, without a word to the contents."""
    reached = Counter()

    @given(st.lists(rows, min_size=1, max_size=4), st.lists(st.tuples(st.integers(0, 3), st.integers(1, MAX_LEN))))
    def all_is_held_that_should_be(all_rows, steps):
        contents, reference = BlockContents(NUM_BLOCKS, BLOCK_SIZE, MAX_LEN), Reference()
        for index, num_tokens in steps:
            tokens, table = all_rows[index % len(all_rows)]
            tokens = tokens[:num_tokens]
            held = contents.num_held(int32(tokens), int32(table))
            assert held == reference.num_held(tokens, table)
            reached["nothing" if not held else "all" if held == len(tokens) else "some"] += 1
            start = min(held, len(tokens) - 1)
            contents.put(int32(tokens), start, int32(table))
            reference.put(tokens, start, table)

    all_is_held_that_should_be()
    assert min(reached[outcome] for outcome in ("nothing", "some", "all")) >= 20, reached


def test_a_block_of_the_same_tokens_behind_others_is_not_held():
    contents = BlockContents(NUM_BLOCKS, BLOCK_SIZE, MAX_LEN)
    contents.put(int32([1, 2, 3, 4, 5, 6]), 0, int32([0, 1]))
    contents.put(int32([3, 2, 1]), 0, int32([2]))
    assert contents.num_held(int32([3, 2, 1, 4, 5, 6]), int32([2, 1])) == 3
    assert contents.num_held(int32([1, 2, 3, 4, 5, 6]), int32([0, 1])) == 6

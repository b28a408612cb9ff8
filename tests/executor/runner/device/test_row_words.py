"""Rows as words on a device: what a batch tells arrives in the columns that kernels read, and nowhere else."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline_executor.errors import StartError
from paceline_executor.limits import MAX_END_TOKENS, RowLimits
from paceline_executor.runner.device.row_words import RowWords
from paceline_executor.runner.interface import (
    NO_CELLS,
    NOTHING_DESCRIBED,
    BlockCells,
    HostTokenLists,
    RowDescriptions,
    SamplingColumns,
    StepBatch,
)

LIMITS = RowLimits(num_rows=4, max_model_len=12, max_num_batched_tokens=16, num_blocks=8, block_size=4, vocab_size=50)


def int32(values):
    """A column."""
    return np.array(values, dtype=np.int32)


def sampling_of(seeds):
    """Parameters that differ from row to row."""
    ones = np.ones(len(seeds), dtype=np.float32)
    columns = (ones * 0.7, int32(range(len(seeds))), ones * 0.9, ones * 0.1, np.array(seeds, dtype=np.uint64))
    return SamplingColumns(*columns, offsets=int32([0] * len(seeds)), num_logprobs=int32([-1] * len(seeds)))


described_rows = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.lists(st.integers(0, 49), min_size=1, max_size=11),
        st.integers(0, 2**64 - 1),
        st.lists(st.integers(0, 49), max_size=3),
    ),
    min_size=1,
    unique_by=lambda row: row[0],
)


def told(rows):
    """A batch that describes these rows and computes all their tokens."""
    lens = [len(token_ids) for _, token_ids, *_ in rows]
    most = max(1, *(len(ends) for *_, ends in rows))
    described = RowDescriptions(
        rows=int32([row for row, *_ in rows]),
        num_prompt=int32([1] * len(rows)),
        num_computed=int32([0] * len(rows)),
        max_known=int32([12] * len(rows)),
        end_token_ids=int32([ends + [-1] * (most - len(ends)) for *_, ends in rows]),
        sampling=sampling_of([seed for _, _, seed, _ in rows]),
        rules=(None,) * len(rows),
        known=HostTokenLists.of([int32(token_ids) for _, token_ids, *_ in rows]),
    )
    cells = BlockCells(described.rows, int32([0] * len(rows)), described.rows + 1)
    return StepBatch(described.rows, int32(lens), int32(lens), int32([]), described, cells)


@given(described_rows)
def test_a_described_row_is_in_every_column_and_no_other_row_changes(rows):
    words = RowWords(LIMITS, torch.device("cpu"))
    words.words.fill_(-7)
    batch = told(rows)
    changes = words.changes(batch)
    assert np.unique(changes.places).size == changes.places.size
    words.words.numpy()[changes.places] = changes.values
    state, draws = words.state, words.draws
    for index, (row, token_ids, seed, ends) in enumerate(rows):
        assert state.token_ids[row, : len(token_ids)].tolist() == token_ids
        counts = (state.num_held, draws.num_known, state.num_computed, state.finish, draws.num_prompt, draws.max_known)
        assert [int(column[row]) for column in counts] == [len(token_ids), len(token_ids), 0, 0, 1, 12]
        assert int(draws.seeds[row]) % 2**64 == seed
        assert draws.end_tokens[row].tolist() == ends + [-1] * (MAX_END_TOKENS - len(ends))
        assert [float(column[row]) for column in (draws.temperature, draws.top_p, draws.min_p)] == [
            float(np.float32(value)) for value in (0.7, 0.9, 0.1)
        ]
        assert (int(draws.top_k[row]), int(draws.num_logprobs[row])) == (index, -1)
        assert state.block_table[row].tolist() == [row + 1, -7, -7]
    others = sorted(set(range(4)) - {row for row, *_ in rows})
    assert (state.token_ids[others] == -7).all()
    assert (draws.end_tokens[others] == -7).all()
    assert (draws.seeds[others] == (-7 << 32) + 2**32 - 7).all()


def test_nothing_is_told_of_a_row_that_goes_on():
    words, batch = RowWords(LIMITS, torch.device("cpu")), told([(2, [5, 6, 7], 1, [])])
    words.changes(batch)
    later = StepBatch(batch.rows, int32([1]), int32([4]), int32([0]), NOTHING_DESCRIBED, NO_CELLS)
    assert words.changes(later).places.size == 0


def test_more_rows_than_places_can_name_are_refused():
    limits = RowLimits(4096, 2**20, 2048, 2**20, 16, 50)
    with pytest.raises(StartError, match="lower --max-num-seqs or --max-model-len"):
        RowWords(limits, torch.device("meta"))

"""step_inputs: the flat batch of a plan, from what the device knows of its rows, and padding behind it."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_rig.tensors import int32, placed
from paceline_kernels.errors import KernelArgumentError, UnsupportedDeviceError
from paceline_kernels.step_inputs import PlanColumns, RowBuffers, reference, step_inputs

NUM_ROWS, MAX_TOKENS, BLOCK_SIZE = 5, 600, 4
MAX_BLOCKS = MAX_TOKENS // BLOCK_SIZE


def row_state(num_held, num_computed, finish=(0,) * NUM_ROWS):
    """Rows of random tokens in random blocks."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randperm(NUM_ROWS * MAX_BLOCKS, generator=generator).int().view(NUM_ROWS, MAX_BLOCKS)
    return RowBuffers(
        token_ids=torch.randint(0, 1000, (NUM_ROWS, MAX_TOKENS), generator=generator, dtype=torch.int32),
        num_held=int32(*num_held),
        num_computed=int32(*num_computed),
        finish=torch.tensor(finish, dtype=torch.int32),
        block_table=blocks,
    )


@pytest.fixture(autouse=True)
def _small_programs(is_gpu, monkeypatch):
    """So that every loop goes round more than once."""
    if is_gpu:
        from paceline_kernels.step_inputs import triton as kernels

        monkeypatch.setattr(kernels, "BLOCK", dict.fromkeys(kernels.BLOCK, 16))
        monkeypatch.setattr(kernels, "_PROGRAMS_PER_ROW", 2)


def check(place, state, plan, num_tokens):
    """It is what the reference makes; the cells that nobody may read are not looked at."""
    expected = reference.step_inputs(state, plan, num_tokens, BLOCK_SIZE)
    ours = step_inputs(placed(place, state), placed(place, plan), num_tokens, BLOCK_SIZE)
    for field in dataclasses.fields(ours):
        if field.name != "block_tables":
            assert torch.equal(getattr(ours, field.name).cpu(), getattr(expected, field.name)), field.name
    for row, context_len in enumerate(expected.context_lens.tolist()):
        cells = slice(-(-context_len // BLOCK_SIZE))
        assert torch.equal(ours.block_tables[row, cells].cpu(), expected.block_tables[row, cells])
    return expected


def test_chunks_decodes_ended_rows_and_padding_lie_one_after_the_other(place):
    """A chunk longer than a program does at a time, a decode, a row that has ended, one that is no row, drafts."""
    state = row_state((520, 9, 7, 30, 40), (3, 8, 6, 30, 37), finish=(0, 0, 1, 0, 0))
    expected = check(place, state, PlanColumns(int32(4, 0, 2, -1, 1), int32(8, 517, 1, 1, 1)), 640)
    assert expected.cu_seqlens.tolist() == [0, 3, 520, 520, 520, 521]


def test_what_has_no_room_is_not_computed(place):
    """Nothing points beyond the batch: the rows are as if less had been planned."""
    state = row_state((9,) * NUM_ROWS, (2,) * NUM_ROWS)
    expected = check(place, state, PlanColumns(int32(3, 0, 1), int32(4, 4, 4)), 6)
    assert expected.cu_seqlens.tolist() == [0, 4, 6, 6]
    assert expected.context_lens.tolist() == [6, 4, 2]


def test_a_token_without_a_block_has_no_slot(place):
    state = row_state((9,) * NUM_ROWS, (0,) * NUM_ROWS)
    state.block_table[3, 1:] = -1
    expected = check(place, state, PlanColumns(int32(3), int32(6)), 6)
    assert expected.slot_mapping[4:].tolist() == [-1, -1]


@settings(max_examples=settings.default.max_examples // 4, deadline=None)  # on a GPU the first one compiles
@given(data=st.data())
def test_any_plan_gives_what_the_reference_gives(backend, data):
    num_held = data.draw(st.lists(st.integers(0, 20), min_size=NUM_ROWS, max_size=NUM_ROWS))
    num_computed = [data.draw(st.integers(0, held)) for held in num_held]
    finish = data.draw(st.lists(st.integers(0, 2), min_size=NUM_ROWS, max_size=NUM_ROWS))
    rows = data.draw(st.lists(st.integers(-1, NUM_ROWS), min_size=1, max_size=NUM_ROWS, unique=True))
    num_tokens = data.draw(st.lists(st.integers(0, 9), min_size=len(rows), max_size=len(rows)))
    padding = data.draw(st.integers(-min(2, sum(num_tokens)), 3))
    plan = PlanColumns(int32(*rows), int32(*num_tokens))
    with backend.memory() as place:
        check(place, row_state(num_held, num_computed, finish), plan, sum(num_tokens) + padding)


def test_a_plan_of_nothing_and_a_device_without_kernels_are_refused():
    state = row_state((0,) * NUM_ROWS, (0,) * NUM_ROWS)
    with pytest.raises(KernelArgumentError, match="a plan names 1 to 4096 rows, not 0"):
        step_inputs(state, PlanColumns(int32(), int32()), 1, 4)
    with pytest.raises(UnsupportedDeviceError, match="device 'meta'; this version has: cpu, and cuda"):
        step_inputs(placed(lambda column: column.to("meta"), state), PlanColumns(int32(0), int32(1)), 1, 4)

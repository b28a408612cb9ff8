"""prompt_lookup: drafts are what followed a row's last tokens before, and the reference says which."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_rig.tensors import int32, placed
from paceline_executor.runner.drafter import PromptLookup
from paceline_kernels.draws import FinishCode, RowDraws
from paceline_kernels.errors import KernelArgumentError, UnsupportedDeviceError
from paceline_kernels.prompt_lookup import lookup_drafts, reference
from paceline_kernels.step_inputs import PlanColumns, RowBuffers

MAX_TOKENS = 40


@pytest.fixture(autouse=True)
def _few_at_a_time(is_gpu, monkeypatch):
    """So that every loop goes round more than once."""
    if is_gpu:
        monkeypatch.setattr("paceline_kernels.prompt_lookup.triton._BLOCK", 16)


def columns_of(rows):
    """Rows that hold these tokens, of which all but the last so many are computed, on the host."""
    tokens = torch.full((len(rows), MAX_TOKENS), 1, dtype=torch.int32)
    for index, (known, _, _) in enumerate(rows):
        tokens[index, : len(known)] = int32(*known)
    num_known = int32(*(len(known) for known, _, _ in rows))
    ahead, finish = int32(*(ahead for _, ahead, _ in rows)), int32(*(finish for _, _, finish in rows))
    nothing = torch.zeros(len(rows))
    state = RowBuffers(tokens, num_known.clone(), num_known - ahead, finish, torch.zeros((len(rows), 5)).int())
    ends, ints = int32(-1).repeat(len(rows), 1), nothing.int()
    return state, RowDraws(ints, num_known, ints, ends, nothing, ints, nothing, nothing, nothing.long(), ints)


def drafts_of(place, rows, planned, max_drafts, min_chance=0.0):
    """What is written is what the reference writes; returns the drafts of each row."""
    columns = (*columns_of(rows), PlanColumns(int32(*(row for row, _ in planned)), int32(*(n for _, n in planned))))
    ours, chance = [placed(place, each) for each in columns], torch.tensor([min_chance])
    lookup_drafts(*ours, max_drafts, place(chance))
    state, draws, plan = columns
    reference.lookup_drafts(state, draws, plan, max_drafts, chance)
    for name in RowBuffers.__slots__:
        assert torch.equal(getattr(ours[0], name).cpu(), getattr(state, name)), name
    return [
        tokens[known:held].tolist()
        for tokens, known, held in zip(state.token_ids, draws.num_known.tolist(), state.num_held.tolist(), strict=True)
    ]


@st.composite
def rows_of_few_tokens(draw):
    """Few kinds of tokens, so that there is much to be found; some not computed, some rows ended."""
    known = draw(st.lists(st.integers(0, 2), min_size=1, max_size=MAX_TOKENS))
    return known, draw(st.integers(1, len(known))), draw(st.sampled_from([0, 0, 0, int(FinishCode.LENGTH)]))


@settings(max_examples=settings.default.max_examples // 4, deadline=None)  # on a GPU the first one compiles
@given(st.lists(rows_of_few_tokens(), min_size=1, max_size=4), st.data())
def test_any_rows_have_the_drafts_that_the_reference_finds(backend, rows, data):
    order = data.draw(st.permutations(range(-1, len(rows))))
    planned = [(row, data.draw(st.integers(0, MAX_TOKENS))) for row in order]
    min_chance = data.draw(st.sampled_from([0.0, 0.31, 0.57, 0.83]))
    with backend.memory() as place:
        drafts_of(place, rows, planned, data.draw(st.integers(1, 9)), min_chance)


def drafts(place, known, num_drafts, max_drafts=8, min_chance=0.0):
    """Of a row that decodes."""
    (found,) = drafts_of(place, [(known, 1, 0)], [(0, 1 + num_drafts)], max_drafts, min_chance)
    return found


def test_the_longest_match_counts_and_of_equal_ones_the_latest(place):
    """What follows 1 2 3 is taken rather than what follows 2 3; of 8 8 9 and 8 8 7 the latter."""
    assert drafts(place, [1, 2, 3, 4, 5, 0, 2, 3, 6, 1, 2, 3], 2) == [4, 5]
    assert drafts(place, [8, 8, 9, 8, 8, 7, 8, 8], 1) == [7]


def test_what_repeats_goes_on_repeating(place):
    assert drafts(place, [5, 6, 5, 6], 5) == [5, 6, 5, 6, 5]


def test_one_token_alike_is_no_match_and_a_full_row_has_no_room(place):
    assert drafts(place, [1, 2, 1], 4) == drafts(place, [1], 4) == []
    assert drafts(place, [3, 4] * (MAX_TOKENS // 2), 4) == []
    assert drafts(place, [3, 4] * (MAX_TOKENS // 2 - 1), 4) == [3, 4]


def test_no_more_drafts_than_were_planned_and_none_before_the_end_of_what_is_known(place):
    assert drafts(place, [7] * 9, 3) == [7] * 3
    assert drafts(place, [7] * 9, 6, max_drafts=2) == [7] * 2
    row = ([7] * 9, 5, 0)
    assert drafts_of(place, [row, row, row], [(0, 4), (1, 5), (2, 6)], 8) == [[], [], [7]]


LENGTHS, CHANCES = (2, 3, 7, 13, 30), (0.0, 1 / 14, 0.31, 0.57, 0.72, 0.91, 0.95)


@pytest.mark.parametrize(
    ("length", "min_chance"),
    [
        pytest.param(length, chance, marks=[] if i % len(LENGTHS) == j else pytest.mark.slow)
        for i, chance in enumerate(CHANCES)
        for j, length in enumerate(LENGTHS)
    ],
)
def test_as_many_are_worth_their_time_as_the_executors_drafter_finds(place, length, min_chance):
    """By the length of the match alone."""
    known = [7] * length if length > 15 else [*range(1, length + 1), 40, 41, 0, *range(1, length + 1)]
    expected = PromptLookup().draft(np.array(known, dtype=np.int32), 8, min_chance)

    assert drafts(place, known, 8, min_chance=min_chance) == expected.tolist()


@settings(max_examples=settings.default.max_examples * 2)
@given(rows_of_few_tokens(), st.integers(1, 8), st.sampled_from([0.0, 0.31, 0.57, 0.83]))
def test_the_executors_drafter_of_hosts_finds_what_the_reference_finds(row, num_drafts, min_chance):
    known, _, _ = row
    state, draws = columns_of([(known, 1, 0)])
    plan, num_drafts = PlanColumns(int32(0), int32(1 + num_drafts)), min(num_drafts, MAX_TOKENS - len(known))
    reference.lookup_drafts(state, draws, plan, num_drafts, torch.tensor([min_chance]))
    found = PromptLookup().draft(np.array(known, dtype=np.int32), num_drafts, min_chance)
    assert found.tolist() == state.token_ids[0, len(known) : int(state.num_held[0])].tolist()


def test_other_devices_and_other_shapes_are_refused():
    state, rows = columns_of([([1, 2], 1, 0)])
    plan = PlanColumns(int32(0), int32(2))
    with pytest.raises(KernelArgumentError, match="0 to 63 drafts, not 64"):
        lookup_drafts(state, rows, plan, 64, torch.zeros(1))
    meta = [placed(lambda tensor: tensor.to("meta"), columns) for columns in (state, rows, plan)]
    with pytest.raises(UnsupportedDeviceError):
        lookup_drafts(*meta, 1, torch.zeros(1, device="meta"))

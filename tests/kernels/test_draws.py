"""draws: which tokens of a batch are drawn after, how drafts are verified, and when rows end."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_rig.tensors import int32, placed
from paceline_kernels.draws import FinishCode, RowDraws, advance_rows, draw_inputs, reference
from paceline_kernels.errors import KernelArgumentError, UnsupportedDeviceError
from paceline_kernels.sampling import SampleOutcome, Samples
from paceline_kernels.step_inputs import PlanColumns, RowBuffers
from paceline_kernels.step_inputs import reference as step_inputs_reference

MAX_TOKENS, BLOCK_SIZE, END = 20, 4, 99


@dataclasses.dataclass
class Row:
    """A row of a test: known tokens, and drafts behind them."""

    known: list
    drafts: list = dataclasses.field(default_factory=list)
    num_computed: int | None = None  # all known tokens but the last
    max_known: int = MAX_TOKENS + 1
    finish: int = FinishCode.GOES_ON


def columns_of(*rows):
    """The state of rows, and what is kept for their draws; every row has other sampling parameters, and one prompt."""
    num_rows = len(rows)
    tokens = torch.full((num_rows, MAX_TOKENS), 7, dtype=torch.int32)
    for index, row in enumerate(rows):
        held = int32(*row.known, *row.drafts)
        tokens[index, : len(held)] = held
    num_known = int32(*(len(row.known) for row in rows))
    computed = [len(row.known) - 1 if row.num_computed is None else row.num_computed for row in rows]
    state = RowBuffers(
        token_ids=tokens,
        num_held=num_known + int32(*(len(row.drafts) for row in rows)),
        num_computed=int32(*computed),
        finish=torch.tensor([row.finish for row in rows], dtype=torch.int32),
        block_table=torch.arange(num_rows * 5, dtype=torch.int32).view(num_rows, 5),
    )
    steps = torch.arange(1, num_rows + 1)
    draws = RowDraws(
        num_prompt=torch.ones(num_rows, dtype=torch.int32),
        num_known=num_known,
        max_known=int32(*(row.max_known for row in rows)),
        end_tokens=int32(END, -1, -1).repeat(num_rows, 1),
        temperature=steps / 10,
        top_k=steps.int() + 10,
        top_p=steps / 20,
        min_p=steps / 30,
        seeds=steps + 2**40,
        num_logprobs=steps.int() - 2,
    )
    return state, draws


def assert_equal(ours, expected):
    """Column by column."""
    for field in dataclasses.fields(expected):
        mine, theirs = getattr(ours, field.name), getattr(expected, field.name)
        if dataclasses.is_dataclass(theirs):
            assert_equal(mine, theirs)
        else:
            assert torch.equal(mine.cpu(), theirs), field.name


def samples_of(token_ids, outcomes=None):
    """What was drawn."""
    token_ids = int32(*token_ids)
    outcomes = torch.zeros_like(token_ids) if outcomes is None else int32(*outcomes)
    nothing = torch.zeros(len(token_ids), 0)
    return Samples(token_ids, outcomes, torch.zeros(len(token_ids)), nothing.int(), nothing)


def step(place, state, rows, plan, drawn, *, num_draws=None, max_drafts=4):
    """One step, which must do what the reference does; `drawn` makes samples of the draws."""
    num_tokens = int(plan.num_tokens.sum())
    batch = step_inputs_reference.step_inputs(state, plan, num_tokens, BLOCK_SIZE)
    given = [placed(place, columns) for columns in (state, rows, plan, batch)]
    num_draws = num_tokens if num_draws is None else num_draws
    draws = reference.draw_inputs(state, rows, plan, batch, num_draws, max_drafts)
    ours = draw_inputs(*given, num_draws, max_drafts)
    assert_equal(ours, draws)
    samples = drawn(draws)
    advanced = reference.advance_rows(state, rows, plan, batch, draws, samples, max_drafts)
    assert_equal(advance_rows(*given, ours, placed(place, samples), max_drafts), advanced)
    assert_equal(given[0], state)
    assert_equal(given[1], rows)
    return draws, advanced


def test_a_row_draws_after_its_last_known_token_and_after_every_draft(place):
    state, rows = columns_of(
        Row([1] * 9, num_computed=2), Row([1, 2], [3, 4]), Row([1, 2], finish=FinishCode.LENGTH), Row([1, 2, 3])
    )
    plan = PlanColumns(int32(1, 0, 2, -1, 3), int32(3, 6, 1, 1, 1))
    draws, advanced = step(place, state, rows, plan, lambda draws: samples_of([3, 4, 5, 6] + [0] * 8))
    assert draws.cu_draws.tolist() == [0, 3, 3, 3, 3, 4]
    assert draws.places.tolist()[:5] == [0, 1, 2, 9, -1]
    assert draws.parameters.offsets.tolist()[:4] == [1, 2, 3, 2]
    assert draws.parameters.seeds.tolist()[:4] == [2**40 + 2] * 3 + [2**40 + 4]
    assert advanced.num_accepted.tolist() == [3, 0, 0, 0, 1]
    assert state.num_computed.tolist() == [8, 4, 1, 3]


@pytest.mark.parametrize(
    ("drafts", "drawn", "outcomes", "accepted", "finish", "computed"),
    [
        ([5, 6, 8], [5, 6, 8, 9], [0, 0, 0, 0], 4, FinishCode.GOES_ON, 5),
        ([5, 6, 8], [5, 7, 8, 9], [0, 0, 0, 0], 2, FinishCode.GOES_ON, 3),
        ([5, 6, 8], [4, 6, 8, 9], [0, 0, 0, 0], 1, FinishCode.GOES_ON, 2),
        ([5, 99, 8], [5, 99, 8, 9], [0, 0, 0, 0], 2, FinishCode.END_TOKEN, 3),
        ([5, 6, 99], [5, 6, 99, 9], [0, 0, 0, 0], 3, FinishCode.END_TOKEN, 4),
        ([5, 6, 8], [5, 6, 8, 9], [0, 1, 0, 0], 1, FinishCode.ERROR, 3),
        ([5, 6, 8], [5, 6, 8, 9], [2, 0, 0, 0], 0, FinishCode.ERROR, 2),
        ([5, 6, 8], [4, 6, 8, 9], [0, 1, 1, 1], 1, FinishCode.GOES_ON, 2),
    ],
    ids=["all right", "one right", "none right", "end", "end beats length", "second fails", "first fails", "unused"],
)
def test_tokens_are_taken_up_to_the_first_wrong_draft_or_the_end(
    place, drafts, drawn, outcomes, accepted, finish, computed
):
    state, rows = columns_of(Row([1, 2], drafts, max_known=5 if 99 in drafts else 99), Row([3]))
    plan = PlanColumns(int32(1, 0), int32(0, 4))
    _, advanced = step(place, state, rows, plan, lambda draws: samples_of(drawn, outcomes))
    assert advanced.num_accepted.tolist() == [0, accepted]
    assert advanced.finish.tolist() == [FinishCode.GOES_ON, finish]
    assert state.token_ids[0, 2 : 2 + accepted].tolist() == drawn[:accepted]
    assert state.num_held[0] == rows.num_known[0] == 2 + accepted
    assert state.num_computed[0] == computed


@pytest.mark.parametrize("drawn", [5, END])
def test_a_row_that_has_no_room_left_takes_nothing(place, drawn):
    state, rows = columns_of(Row([1] * MAX_TOKENS, [], max_known=99), Row([2, 2]))
    _, advanced = step(place, state, rows, PlanColumns(int32(0), int32(1)), lambda draws: samples_of([drawn]))
    assert (advanced.num_accepted.tolist(), advanced.finish.tolist()) == ([0], [FinishCode.CONTEXT_FULL])
    assert state.token_ids[1, 0] == 2


@pytest.mark.parametrize(
    ("known", "max_known", "finish"), [(3, 5, FinishCode.LENGTH), (18, 99, FinishCode.CONTEXT_FULL)]
)
def test_a_row_takes_no_more_tokens_than_it_may(place, known, max_known, finish):
    state, rows = columns_of(Row([1] * known, [5] * min(4, MAX_TOKENS - known), max_known=max_known))
    _, advanced = step(place, state, rows, PlanColumns(int32(0), int32(5)), lambda draws: samples_of([5] * 5))
    assert (advanced.num_accepted.tolist(), advanced.finish.tolist()) == ([2], [finish])


def test_what_has_no_room_among_the_draws_is_drawn_in_the_next_step(place):
    state, rows = columns_of(Row([1, 2], [5, 6]), Row([3, 4]))
    plan = PlanColumns(int32(0, 1), int32(3, 1))
    draws, advanced = step(place, state, rows, plan, lambda draws: samples_of([5, 6]), num_draws=2)
    assert draws.cu_draws.tolist() == [0, 2, 2]
    assert advanced.num_accepted.tolist() == [2, 0]
    assert state.num_computed.tolist() == [3, 1]


ROWS = st.builds(
    Row,
    known=st.lists(st.integers(0, 2), min_size=1, max_size=12),
    drafts=st.lists(st.integers(0, 2), max_size=5),
    max_known=st.integers(13, 25),
    finish=st.sampled_from([0, 0, 0, 1]),
)


@settings(max_examples=settings.default.max_examples // 4, deadline=None)  # on a GPU the first one compiles
@given(rows=st.lists(ROWS, min_size=1, max_size=4), data=st.data())
def test_any_step_does_what_the_reference_does(backend, rows, data):
    for row in rows:
        row.num_computed = data.draw(st.integers(0, len(row.known) - 1))
    state, columns = columns_of(*rows)
    planned = data.draw(st.lists(st.integers(-1, len(rows)), min_size=1, max_size=5, unique=True))
    num_tokens = data.draw(st.lists(st.integers(1, 9), min_size=len(planned), max_size=len(planned)))

    def drawn(draws):
        size = {"min_size": len(draws.places), "max_size": len(draws.places)}
        outcomes = data.draw(st.lists(st.sampled_from([0, 0, 0, 0, *SampleOutcome]), **size))
        return samples_of(data.draw(st.lists(st.sampled_from([0, 1, 2, END]), **size)), outcomes)

    plan, num_draws = PlanColumns(int32(*planned), int32(*num_tokens)), data.draw(st.integers(1, sum(num_tokens) + 2))
    with backend.memory() as place:
        step(place, state, columns, plan, drawn, num_draws=num_draws, max_drafts=data.draw(st.integers(0, 5)))


def model(tokens):
    """The token that follows others, for a model of three tokens and an end."""
    return END if sum(tokens) % 11 == 10 else (sum(tokens) + len(tokens)) % 3


@given(prompt=st.lists(st.integers(0, 2), min_size=1, max_size=4), data=st.data())
def test_drafts_change_no_token(prompt, data):
    """Whatever is drafted, a row's tokens are those that it would have drawn one by one."""
    state, rows = columns_of(Row(prompt, num_computed=0, max_known=data.draw(st.integers(5, 25))))
    while not state.finish[0]:
        held = int(rows.num_known[0])
        drafts = data.draw(st.lists(st.integers(0, 2), max_size=min(4, MAX_TOKENS - held)))
        state.token_ids[0, held : held + len(drafts)] = int32(*drafts)
        state.num_held[0] = held + len(drafts)
        plan = PlanColumns(int32(0), int32(data.draw(st.integers(1, 6))))
        batch = step_inputs_reference.step_inputs(state, plan, 6, BLOCK_SIZE)
        draws = reference.draw_inputs(state, rows, plan, batch, 6, 5)
        seen = [state.token_ids[0, : batch.positions[place] + 1].tolist() for place in draws.places if place >= 0]
        samples = samples_of([model(tokens) for tokens in seen] + [0] * (6 - len(seen)))
        reference.advance_rows(state, rows, plan, batch, draws, samples, 5)
        assert state.num_computed[0] < rows.num_known[0]

    expected = list(prompt)
    while len(expected) < min(MAX_TOKENS, rows.max_known[0]) and END not in expected:
        expected.append(model(expected))
    assert state.token_ids[0, : rows.num_known[0]].tolist() == expected


def test_what_cannot_be_done_is_refused():
    state, rows = columns_of(Row([1]))
    plan = PlanColumns(int32(0), int32(1))
    batch = step_inputs_reference.step_inputs(state, plan, 1, BLOCK_SIZE)
    with pytest.raises(KernelArgumentError, match="a row has 0 to 63 drafts, not 64"):
        draw_inputs(state, rows, plan, batch, 1, 64)
    with pytest.raises(KernelArgumentError, match="a row has up to 128 end tokens, not 129"):
        draw_inputs(state, dataclasses.replace(rows, end_tokens=torch.zeros(1, 129).int()), plan, batch, 1)
    there = [placed(lambda column: column.to("meta"), columns) for columns in (state, rows)]
    with pytest.raises(UnsupportedDeviceError, match="device 'meta'; this version has: cpu, and cuda"):
        draw_inputs(*there, plan, batch, 1)
    draws = reference.draw_inputs(state, rows, plan, batch, 1)
    with pytest.raises(UnsupportedDeviceError, match="device 'meta'; this version has: cpu, and cuda"):
        advance_rows(*there, plan, batch, draws, samples_of([5]))

"""One step after another on permanent rows, with a runner that reads every token back through the block table.

That chunks, shared, copied and replaced blocks, preemptions and failed steps change no token is shown by the random
plans of `test_properties`; here is what these do not tell.
"""

import numpy as np
import pytest

from executor_rig.hash_runner import HashRunner, continuation, next_token
from executor_rig.plans import placement, plan, record
from executor_rig.stepping import SteppingEngine
from paceline.plan.hashes import HASH_START
from paceline.plan.values import RowFinish, StepResult
from paceline_executor.errors import StepFailedError
from paceline_executor.limits import RowLimits
from paceline_executor.rows import outcome
from paceline_executor.rows.table import RowTable

pytestmark = pytest.mark.usefixtures("seen_or_hidden")

LIMITS = RowLimits(
    num_rows=4, max_model_len=16, max_num_batched_tokens=20, num_blocks=12, block_size=4, vocab_size=1000
)
KEY = bytes(range(16))


@pytest.fixture
def runner():
    """A runner that can be made to fail."""
    return HashRunner(LIMITS.num_blocks, LIMITS.block_size, LIMITS.vocab_size)


@pytest.fixture
def engine(runner):
    """Four free rows of 16 tokens, twelve blocks of 4."""
    return SteppingEngine(RowTable(LIMITS), runner)


def reference(prompt, num_tokens):
    """The output a prompt must give."""
    return continuation(prompt, num_tokens, LIMITS.vocab_size)


def _tokens_of(result: StepResult) -> list[int]:
    return result.token_ids.tolist()


def test_a_row_ends_at_an_end_token_and_later_plans_write_nothing(engine, runner):
    """Plans that were on their way when the row ended return 0 for it."""
    stop = reference([5, 6], 2)[1]
    place = [placement(0, [5, 6], end_token_ids=[7, stop])]
    engine.execute(plan([(0, 2)], place=place, grants=[(0, 0, 2)]))
    ended = engine.execute(plan([(0, 1)], step_id=2))
    num_steps = runner.num_steps
    late = engine.execute(plan([(0, 1)], step_id=3, grants=[(0, 1, 3)]))

    assert ended.finishes.tolist() == [RowFinish.END_TOKEN]
    assert _tokens_of(ended) == [stop]
    assert (late.num_accepted.tolist(), _tokens_of(late)) == ([0], [])
    assert late.finishes.tolist() == [RowFinish.END_TOKEN]
    assert runner.num_steps == num_steps


def test_a_row_ends_at_max_tokens(engine):
    place = [placement(0, [1], output=[2, 3], max_tokens=4)]
    first = engine.execute(plan([(0, 3)], place=place, grants=[(0, 0, 0), (0, 1, 1)]))
    second = engine.execute(plan([(0, 1)], step_id=2))

    assert first.finishes.tolist() == [RowFinish.GOES_ON]
    assert second.finishes.tolist() == [RowFinish.LENGTH]


def test_a_row_ends_when_its_context_is_full(engine):
    """The last token of a context is drawn but never computed."""
    cells = [(0, index, index) for index in range(4)]
    place = [placement(0, list(range(14)), max_tokens=100)]
    first = engine.execute(plan([(0, 14)], place=place, grants=cells))
    second = engine.execute(plan([(0, 1)], step_id=2))

    assert first.finishes.tolist() == [RowFinish.GOES_ON]
    assert second.finishes.tolist() == [RowFinish.CONTEXT_FULL]
    assert engine.table.states()[0].output_token_ids.size == 2


def test_a_row_forgets_what_its_last_request_shared(engine):
    prompt = [1, 2, 3, 4, 5]
    engine.execute(plan([(0, 5)], place=[placement(0, prompt)], grants=[(0, 0, 7), (0, 1, 8)]))
    sharing = placement(1, prompt, num_cached_tokens=4)
    engine.execute(plan([(1, 1)], step_id=2, place=[sharing], shared=[(1, 0, 7)], grants=[(1, 1, 9)]))
    engine.execute(plan(step_id=3, preempt=[1]))

    result = engine.execute(plan([(1, 1)], step_id=4, place=[placement(1, [6], name="b")], grants=[(1, 0, 3)]))

    assert _tokens_of(result) == reference([6], 1)


def test_a_grant_for_writing_clears_the_blocks_tag(engine):
    engine.execute(plan(tags=[(5, KEY), (6, KEY)]))
    engine.execute(plan(step_id=2, place=[placement(0, [1])], grants=[(0, 0, 5)]))
    engine.execute(plan(step_id=3, tags=[(3, KEY), (6, bytes(16))]))

    tags = engine.table.tags()
    assert (tags.block_ids.tolist(), tags.keys) == ([3], KEY)


def test_a_final_release_cuts_the_record_and_a_preemption_does_not(engine):
    place = [placement(0, [1, 2]), placement(1, [3, 4])]
    cells = [(0, 0, 0), (1, 0, 1)]
    engine.execute(plan([(0, 2), (1, 2)], place=place, grants=cells))
    engine.execute(plan([(0, 1), (1, 1)], step_id=2))
    engine.execute(plan(step_id=3, finish=[(0, 1)], preempt=[1]))

    preempted, finished = engine.table.states()
    assert (finished.record_id, finished.row) == (record("request-0"), None)
    assert finished.output_token_ids.tolist() == reference([1, 2], 1)
    assert finished.released is not None
    assert preempted.output_token_ids.tolist() == reference([3, 4], 2)
    assert (preempted.released, preempted.block_ids.size) == (None, 0)
    assert engine.table.num_granted_blocks == 0


def test_a_row_whose_logits_are_no_numbers_fails_alone(engine, runner):
    runner.faulty_tokens = frozenset({13})
    place = [placement(0, [13]), placement(1, [1])]

    result = engine.execute(plan([(0, 1), (1, 1)], place=place, grants=[(0, 0, 0), (1, 0, 1)]))

    assert result.finishes.tolist() == [RowFinish.ERROR, RowFinish.GOES_ON]
    assert result.num_accepted.tolist() == [0, 1]
    assert [(error.row, error.reason) for error in result.errors] == [(0, "NUMERIC_FAULT")]
    assert engine.execute(plan([(0, 1), (1, 1)], step_id=2)).num_accepted.tolist() == [0, 1]


def test_the_grant_hash_follows_the_protocols_description(engine):
    def carried(value, row, index, block):
        value = ((value ^ ((row * 2**48 + index * 2**32 + block) % 2**64)) * 0x100000001B3) % 2**64
        return value ^ (value >> 32)

    first = engine.execute(plan(place=[placement(1, [1] * 9)], shared=[(1, 0, 3)], grants=[(1, 1, 4), (1, 2, 2)]))
    second = engine.execute(plan(step_id=2, place=[placement(3, [1])], grants=[(3, 0, 11)]))

    expected = carried(carried(carried(HASH_START, 1, 1, 4), 1, 2, 2), 1, 0, 3)
    assert first.grant_hash == expected
    assert second.grant_hash == carried(expected, 3, 0, 11)
    engine.table.begin_epoch()
    assert engine.execute(plan(epoch=2)).grant_hash == HASH_START


def test_a_plan_without_rows_runs_nothing(engine, runner):
    """It only changes state."""
    result = engine.execute(plan(place=[placement(0, [1])], grants=[(0, 0, 1)]))

    assert runner.num_steps == 0
    assert result.rows.size == 0
    assert engine.table.num_rows_in_use == 1


def test_seeds_and_offsets_reach_the_sampler(engine):
    sampling = placement(0, [1]).sampling
    seeded = type(sampling)(temperature=1.0, top_k=5, top_p=0.5, min_p=0.1, seed=2**64 - 1)
    place = [placement(0, [1], output=[7], sampling=seeded)]

    result = engine.execute(plan([(0, 2)], place=place, grants=[(0, 0, 1)]))

    assert _tokens_of(result) == [next_token([1, 7], 2**64 - 1, 1, LIMITS.vocab_size)]


def test_columns_reach_the_runner_as_the_seam_describes_them(engine):
    table = engine.table
    engine.execute(plan([(1, 5)], place=[placement(1, [1, 2, 3, 4, 5])], grants=[(1, 0, 8), (1, 1, 9)]))
    step = plan([(0, 2), (1, 1)], step_id=2, place=[placement(0, [6, 7, 8])], grants=[(0, 0, 3)])

    batch = table.launch(step, 0).prepared.batch

    assert (batch.rows.tolist(), batch.num_tokens.tolist()) == ([0, 1], [2, 1])
    assert (batch.described.rows.tolist(), batch.described.known.token_ids.tolist()) == ([0], [6, 7, 8])
    assert batch.cells.block_ids.tolist() == [3]
    assert batch.context_lens.tolist() == [2, 6]
    assert batch.sampled.tolist() == [1]
    columns = (batch.rows, batch.num_tokens, batch.context_lens, batch.sampled)
    assert all(column.dtype == np.int32 for column in columns)


@pytest.mark.parametrize("part", ["advance", "report"])
def test_a_step_that_fails_at_its_very_end_has_not_advanced_either(engine, monkeypatch, part):
    engine.execute(plan([(0, 2)], place=[placement(0, [1, 2], num_logprobs=2)], grants=[(0, 0, 0)]))
    before = [repr(state) for state in engine.table.states()]
    real = getattr(outcome, part)

    def do_and_fail(*arguments):
        real(*arguments)
        raise MemoryError("of the test")

    with monkeypatch.context() as patch:
        patch.setattr(outcome, part, do_and_fail)
        with pytest.raises(StepFailedError):
            engine.execute(plan([(0, 1)], step_id=2))

    assert [repr(state) for state in engine.table.states()] == before
    assert _tokens_of(engine.execute(plan([(0, 1)], step_id=2))) == [reference([1, 2], 2)[1]]

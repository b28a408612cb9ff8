"""Log-probabilities stay with the tokens they belong to: in rows and records, through releases and failed steps."""

from dataclasses import replace

import pytest

from executor_rig.hash_runner import HashRunner, continuation
from executor_rig.plans import int32, placement, plan
from executor_rig.stepping import SteppingEngine
from paceline_executor.errors import PlanError, StepFailedError
from paceline_executor.limits import RowLimits
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.simulated import logprobs_of

pytestmark = pytest.mark.usefixtures("seen_or_hidden")

LIMITS = RowLimits(
    num_rows=2, max_model_len=32, max_num_batched_tokens=20, num_blocks=12, block_size=4, vocab_size=1000
)
PROMPT = [1, 2, 3]
BLOCKS = [(0, index, index) for index in range(4)]


@pytest.fixture
def engine():
    """Two rows, nothing on them."""
    return SteppingEngine(RowTable(LIMITS), HashRunner(LIMITS.num_blocks, LIMITS.block_size, LIMITS.vocab_size))


def _run(engine, num_tokens, *, output=(), num_logprobs=2, prompt=PROMPT):
    """Place the request on row 0 and let it generate so many tokens."""
    request = placement(0, prompt, output=output, num_logprobs=num_logprobs, name="r")
    results = [engine.execute(plan([(0, len(prompt) + len(output))], place=[request], grants=BLOCKS))]
    results += [engine.execute(plan([(0, 1)])) for _ in range(num_tokens - 1)]
    return results


def _expected(num_tokens):
    return continuation(PROMPT, num_tokens, LIMITS.vocab_size)


def assert_same_columns(ours, expected):
    """The same numbers of the same tokens."""
    for name in ("logprobs", "top_token_ids", "top_logprobs"):
        assert getattr(ours, name).tolist() == getattr(expected, name).tolist(), name


def assert_logprobs(state, offset, token_ids):
    """The state has those of exactly these tokens, which are the output from `offset` on."""
    logprobs = state.logprobs
    told = logprobs_of(token_ids, logprobs.num_top)
    assert state.output_token_ids[offset:].tolist() == token_ids
    assert logprobs.offset == offset
    assert_same_columns(logprobs, told)


@pytest.mark.parametrize("num_logprobs", [0, 1, 20])
def test_a_row_keeps_those_of_every_token_it_has_told(engine, num_logprobs):
    results = _run(engine, 3, num_logprobs=num_logprobs)

    (state,) = engine.table.states()
    told = [logprobs for result in results for logprobs in result.logprobs]
    assert [logprobs.token_ids.tolist() for logprobs in told] == [[token_id] for token_id in _expected(3)]
    for logprobs in told:
        assert_same_columns(logprobs.columns, logprobs_of(logprobs.token_ids, num_logprobs))
    assert_logprobs(state, 0, _expected(3))


def test_the_next_request_on_a_row_has_none_of_the_one_before(engine):
    _run(engine, 3)
    engine.execute(plan(finish=[(0, 3)], forget=["r"]))
    engine.execute(plan([(0, 1)], place=[placement(0, [7], name="next")], grants=[(0, 0, 8)]))

    assert [state.logprobs for state in engine.table.states() if state.row == 0] == [None]


@pytest.mark.parametrize("num_kept", [0, 2, 3])
def test_a_record_is_cut_with_its_output(engine, num_kept):
    _run(engine, 3)
    engine.execute(plan(finish=[(0, num_kept)]))

    (record,) = engine.table.states()
    assert_logprobs(record, 0, _expected(3)[:num_kept])


def test_output_that_was_generated_elsewhere_has_none_here(engine):
    _run(engine, 2, output=_expected(3))

    (state,) = engine.table.states()
    assert_logprobs(state, 3, _expected(5)[3:])


def test_a_record_cut_inside_output_from_elsewhere_has_none_left(engine):
    """The offset is never beyond the output."""
    _run(engine, 2, output=_expected(3))
    engine.execute(plan(finish=[(0, 1)]))

    (record,) = engine.table.states()
    assert record.output_token_ids.tolist() == _expected(1)
    assert (record.logprobs.offset, record.logprobs.num_tokens) == (1, 0)


@pytest.mark.parametrize("num_output", [3, 2, 0])
def test_a_preempted_request_placed_again_keeps_those_of_its_output(engine, num_output):
    _run(engine, 3)
    engine.execute(plan(preempt=[0]))
    _run(engine, 2, output=_expected(num_output))

    (state,) = engine.table.states()
    assert_logprobs(state, 0, _expected(num_output + 2))


@pytest.mark.parametrize(
    "changes",
    [{"output": [*_expected(3), 9]}, {"output": [9]}, {"prompt": [9, 9, 9], "output": _expected(2)}],
    ids=["longer", "other output", "other prompt"],
)
def test_those_of_other_tokens_are_not_taken_over(engine, changes):
    _run(engine, 3)
    engine.execute(plan(preempt=[0]))
    _run(engine, 1, **changes)

    (state,) = engine.table.states()
    assert (state.logprobs.offset, state.logprobs.num_tokens) == (len(changes["output"]), 1)


def test_a_step_that_fails_leaves_them_as_they_were(engine):
    _run(engine, 2)
    engine.inner.fail_next = RuntimeError("lost")
    other = placement(1, [7], num_logprobs=3, name="other")
    with pytest.raises(StepFailedError):
        engine.execute(plan([(1, 1)], finish=[(0, 1)], place=[other], grants=[(1, 0, 8)]))

    (state,) = engine.table.states()
    assert_logprobs(state, 0, _expected(2))
    engine.execute(plan([(0, 1)]))
    (state,) = engine.table.states()
    assert_logprobs(state, 0, _expected(3))


def test_a_malformed_plan_leaves_the_record_of_the_attempt_before(engine):
    """Placing takes it away only if the plan takes effect."""
    _run(engine, 2)
    engine.execute(plan(preempt=[0]))
    again = placement(0, PROMPT, output=_expected(2), num_logprobs=2, name="r")
    with pytest.raises(PlanError):
        engine.execute(plan([(1, 1)], place=[again]))

    (record,) = engine.table.states()
    assert_logprobs(record, 0, _expected(2))


def test_a_row_that_fails_alone_tells_none(engine):
    """It drew no token that they could be of."""
    _run(engine, 2)
    engine.inner.faulty_tokens = frozenset(_expected(2))
    result = engine.execute(plan([(0, 1)]))

    (state,) = engine.table.states()
    assert (result.num_accepted.tolist(), result.logprobs) == ([0], ())
    assert_logprobs(state, 0, _expected(2))


@pytest.mark.parametrize(
    "answer",
    [lambda _: None, lambda tokens: logprobs_of(tokens, 1), lambda _: logprobs_of([], 2)],
    ids=["none", "too few alternatives", "of too few tokens"],
)
def test_a_runner_that_leaves_some_out_fails_the_step(engine, monkeypatch, answer):
    """Rather than that tokens and log-probabilities drift apart."""
    _run(engine, 1)
    wait = engine.runner.wait

    def wait_and_change(handle):
        output = wait(handle)
        return replace(output, logprobs=answer(output.token_ids))

    monkeypatch.setattr(engine.runner, "wait", wait_and_change)
    with pytest.raises(StepFailedError):
        engine.execute(plan([(0, 1)]))

    (state,) = engine.table.states()
    assert_logprobs(state, 0, _expected(1))


def test_records_count_them_as_memory():
    """Two of 3 tokens with 20 alternatives do not fit into 3,000 bytes."""
    table = RowTable(replace(LIMITS, max_record_bytes=3000))
    engine = SteppingEngine(table, HashRunner(LIMITS.num_blocks, LIMITS.block_size, LIMITS.vocab_size))
    kept = []
    for num_logprobs in (None, 20):
        for name in ("first", "second"):
            request = replace(placement(0, PROMPT, num_logprobs=num_logprobs, name=name), context=b"x" * 100)
            engine.execute(plan([(0, 3)], place=[request], grants=BLOCKS))
            for _ in range(2):
                engine.execute(plan([(0, 1)]))
            engine.execute(plan(finish=[(0, 3)]))
        kept.append(table.num_records)

    assert kept == [2, 1]


def test_a_snapshot_does_not_change_when_the_row_goes_on(engine):
    _run(engine, 2)
    (state,) = engine.table.states()
    for _ in range(3):
        engine.execute(plan([(0, 1)]))

    assert_logprobs(state, 0, _expected(2))
    assert state.output_token_ids.tolist() == int32(_expected(2)).tolist()

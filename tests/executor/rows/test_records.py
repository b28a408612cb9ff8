"""How long records of released requests are kept, and how a snapshot is cut into messages."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_rig.hash_runner import HashRunner
from executor_rig.plans import GREEDY, int32, placement, plan
from executor_rig.stepping import SteppingEngine
from paceline.plan.values import NO_TAGS, BlockTags, LogprobColumns, RecordId, RowFinish, RowState
from paceline_executor.errors import PlanError
from paceline_executor.limits import RowLimits
from paceline_executor.rows.snapshot import RowSnapshot, parts_of
from paceline_executor.rows.table import RowTable
from virtual_time.clock import ManualClock

pytestmark = pytest.mark.usefixtures("seen_or_hidden")

SECOND = 1_000_000_000
MIB = 2**20
LIMITS = RowLimits(
    num_rows=4,
    max_model_len=16,
    max_num_batched_tokens=20,
    num_blocks=12,
    block_size=4,
    vocab_size=1000,
    max_record_bytes=3000,
    record_keep_ns=60 * SECOND,
)


@pytest.fixture
def clock():
    """In nanoseconds."""
    return ManualClock(0)


@pytest.fixture
def engine(clock):
    """Room for two records."""
    return SteppingEngine(RowTable(LIMITS), HashRunner(12, 4, 1000), clock)


def _released(engine, row, name, step_id, *, preempt=False):
    place = [placement(row, [1], name=name)]
    engine.execute(plan(step_id=step_id, place=place, grants=[(row, 0, row)]))
    if preempt:
        engine.execute(plan(step_id=step_id + 1, preempt=[row]))
    else:
        engine.execute(plan(step_id=step_id + 1, finish=[(row, 0)]))


def _names(engine):
    return [state.record_id.request_id for state in engine.table.states()]


def test_a_refused_plan_leaves_the_order_of_records_as_it_was(engine, clock):
    """What it would have forgotten is the oldest again, and goes first."""
    _released(engine, 0, "older", 1)
    clock.advance(SECOND)
    _released(engine, 0, "younger", 3)
    with pytest.raises(PlanError):
        engine.execute(plan([(0, 1)], step_id=5, forget=["older"]))

    assert _names(engine) == ["older", "younger"]


def test_a_finished_requests_record_goes_a_minute_after_its_finish(engine, clock):
    """A preempted one's stays: the request is not over."""
    _released(engine, 0, "finished", 1)
    _released(engine, 1, "preempted", 3, preempt=True)
    clock.advance(59 * SECOND)
    engine.execute(plan(step_id=5))
    kept = _names(engine)
    clock.advance(SECOND)
    engine.execute(plan(step_id=6))

    assert kept == ["finished", "preempted"]
    assert _names(engine) == ["preempted"]


def test_a_forgotten_record_is_gone_and_forgetting_twice_is_no_mistake(engine):
    """Plans carry the ids to forget; one may have gone by itself."""
    _released(engine, 0, "a", 1)
    engine.execute(plan(step_id=3, forget=["a", "a", "unknown"]))

    assert engine.table.num_records == 0


def test_forgetting_does_not_touch_a_request_on_a_row(engine):
    """Only records are forgotten."""
    engine.execute(plan(place=[placement(0, [1], name="a")]))
    engine.execute(plan(step_id=2, forget=["a"]))

    assert _names(engine) == ["a"]


def test_the_oldest_records_go_when_they_exceed_their_memory(engine, clock):
    """Three do not fit into 3,000 bytes."""
    for number in range(50):
        clock.advance(SECOND)
        _released(engine, 0, f"request-{number}", 2 * number + 1)

    assert _names(engine) == ["request-48", "request-49"]


def logprobs(num_tokens, num_top):
    """Recognisable log-probabilities of a request's output from token 5 on."""
    tops = np.arange(num_tokens * num_top).reshape(num_tokens, num_top)
    return LogprobColumns(5, np.arange(num_tokens, dtype=np.float32), tops.astype(np.int32), tops.astype(np.float32))


def state(number, num_prompt, num_output, num_blocks, num_context, num_logprobs=None):
    """A request with recognisable columns."""
    return RowState(
        record_id=RecordId("tenant", f"request-{number}"),
        row=number,
        attempt=2,
        prompt_token_ids=np.arange(num_prompt, dtype=np.int32),
        output_token_ids=np.arange(num_output, dtype=np.int32) + 7,
        num_computed_tokens=3,
        block_ids=np.arange(num_blocks, dtype=np.int32) + 9,
        finish=RowFinish.LENGTH,
        released=None,
        max_tokens=5,
        sampling=GREEDY,
        end_token_ids=(1, 2),
        context=bytes(num_context),
        logprobs=None if num_logprobs is None else logprobs(*num_logprobs),
    )


def _joined_logprobs(before, after):
    if before is None or after is None:
        assert before is after, "a request has them in every piece or in none"
        return None
    assert after.offset == before.offset + before.num_tokens
    return LogprobColumns(
        before.offset,
        np.concatenate((before.logprobs, after.logprobs)),
        np.concatenate((before.top_token_ids, after.top_token_ids)),
        np.concatenate((before.top_logprobs, after.top_logprobs)),
    )


def _joined(parts):
    whole = []
    for part in parts:
        for piece in part.rows:
            if whole and whole[-1].continues:
                assert piece.record_id == whole[-1].record_id
                whole[-1] = replace(
                    whole[-1],
                    prompt_token_ids=np.concatenate((whole[-1].prompt_token_ids, piece.prompt_token_ids)),
                    output_token_ids=np.concatenate((whole[-1].output_token_ids, piece.output_token_ids)),
                    block_ids=np.concatenate((whole[-1].block_ids, piece.block_ids)),
                    logprobs=_joined_logprobs(whole[-1].logprobs, piece.logprobs),
                    continues=piece.continues,
                )
            else:
                whole.append(piece)
    return whole


sizes = st.integers(0, 400_000)
asked = st.none() | st.tuples(st.integers(0, 20_000), st.integers(0, 20))


@settings(max_examples=settings.default.max_examples * 2 // 5)
@given(st.lists(st.builds(state, st.integers(0, 9), sizes, sizes, sizes, st.integers(0, 500_000), asked), max_size=5))
def test_the_parts_of_a_snapshot_fit_a_message_and_make_up_the_whole(states):
    """No part is larger than 1 MiB, none is empty but the last, and nothing is lost or doubled."""
    parts = list(parts_of(RowSnapshot(tuple(states), NO_TAGS), MIB))

    assert [repr(joined) for joined in _joined(parts)] == [repr(whole) for whole in states]
    assert [part.num_parts for part in parts] == [0] * (len(parts) - 1) + [len(parts)]
    for part in parts[:-1]:
        num_bytes = sum(
            piece.prompt_token_ids.nbytes + piece.output_token_ids.nbytes + piece.block_ids.nbytes + len(piece.context)
            for piece in part.rows
        ) + sum(piece.logprobs.nbytes for piece in part.rows if piece.logprobs is not None)
        assert part.rows
        assert num_bytes < MIB


def test_the_tags_of_a_large_pool_are_cut_as_well():
    """200,000 tags of 20 bytes take four parts."""
    tags = BlockTags(np.arange(200_000, dtype=np.int32), bytes(range(16)) * 200_000)
    parts = list(parts_of(RowSnapshot((), tags), MIB))

    assert np.concatenate([part.tags.block_ids for part in parts]).tolist() == list(range(200_000))
    assert b"".join(part.tags.keys for part in parts) == tags.keys
    assert all(20 * part.tags.block_ids.size <= MIB for part in parts)


def test_an_empty_executor_has_a_snapshot_of_one_part():
    """Plan 1 may be sent after it."""
    (part,) = parts_of(RowSnapshot((), BlockTags(int32([]), b"")), MIB)

    assert part.num_parts == 1

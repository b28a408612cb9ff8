"""Which results wait for the one behind them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor_rig.plans import int32, plan
from paceline_executor.link.result_batcher import ResultBatcher

DECODE, OTHERS, CHUNK = [(0, 1), (3, 1)], [(0, 1)], [(0, 1), (3, 5)]


def leaving(batcher, name, *, together=True):
    """What leaves when the oldest plan is done; a result stands for itself."""
    return () if batcher.holds(name, together=together) else batcher.held()


def expecting(*schedules):
    """Plans to do, by what they run."""
    batcher = ResultBatcher()
    for step_id, scheduled in enumerate(schedules, start=1):
        batcher.expect(plan(scheduled, step_id=step_id))
    return batcher


@pytest.mark.parametrize(
    ("num_plans", "groups"),
    [(1, ["1"]), (2, ["1", "2"]), (3, ["12", "3"]), (4, ["12", "3", "4"]), (6, ["123", "45", "6"])],
)
def test_as_many_are_kept_as_are_to_do(num_plans, groups):
    batcher = expecting(*[DECODE] * num_plans)
    told = ["".join(leaving(batcher, str(number))) for number in range(1, num_plans + 1)]
    assert [group for group in told if group] == groups


@pytest.mark.parametrize("others", [OTHERS, CHUNK, []])
def test_only_a_step_that_decodes_the_same_rows_is_waited_for(others):
    assert leaving(expecting(DECODE, others, DECODE, DECODE), "1") == ("1",)
    assert leaving(expecting(others, DECODE, DECODE, DECODE), "1") == ("1",)
    assert leaving(expecting(DECODE, DECODE, others, DECODE), "1") == ()


@pytest.mark.parametrize(("num_drafts", "told"), [([2, 0], ()), ([1, 0], ("1",))])
def test_drafts_do_not_keep_results_apart(num_drafts, told):
    batcher = ResultBatcher()
    for step_id in range(1, 4):
        batcher.expect(replace(plan([(0, 3), (3, 1)], step_id=step_id), num_draft_tokens=int32(num_drafts)))
    assert leaving(batcher, "1") == told


def test_a_scheduler_of_an_earlier_protocol_gets_each_by_itself():
    assert leaving(expecting(*[DECODE] * 4), "1", together=False) == ("1",)


def test_what_is_kept_leaves_when_it_is_asked_for():
    batcher = expecting(*[DECODE] * 4)
    assert leaving(batcher, "1") == ()
    assert (batcher.held(), batcher.held()) == (("1",), ())
    assert (leaving(batcher, "2"), leaving(batcher, "3")) == ((), ("2", "3"))


@given(st.lists(st.sampled_from([DECODE, OTHERS, CHUNK]), min_size=1, max_size=12), st.data())
def test_every_result_leaves_once_and_in_order(schedules, data):
    """Whatever is planned meanwhile; nothing is kept when nothing is to do, and never more than is to do."""
    batcher, told, num_expected = ResultBatcher(), [], 0
    for number in range(len(schedules)):
        while num_expected <= number or (num_expected < len(schedules) and data.draw(st.booleans())):
            batcher.expect(plan(schedules[num_expected], step_id=num_expected + 1))
            num_expected += 1
        told += leaving(batcher, number)
        assert number + 1 - len(told) < max(1, num_expected - number - 1)
    assert told == list(range(len(schedules)))

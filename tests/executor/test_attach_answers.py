"""Which results wait for the one behind them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_executor.link.answers import Answers
from paceline_executor.testing.plans import plan

DECODE, OTHERS, CHUNK = [(0, 1), (3, 1)], [(0, 1)], [(0, 1), (3, 5)]


def leaving(answers, name, *, together=True):
    """What leaves when the oldest plan is done; a result stands for itself."""
    return answers.give(name, together=together)


def expecting(*schedules):
    """Plans to do, by what they run."""
    answers = Answers()
    for step_id, scheduled in enumerate(schedules, start=1):
        answers.expect(plan(scheduled, step_id=step_id))
    return answers


@pytest.mark.parametrize(
    ("num_plans", "groups"),
    [(1, ["1"]), (2, ["1", "2"]), (3, ["12", "3"]), (4, ["12", "3", "4"]), (6, ["123", "45", "6"])],
)
def test_as_many_are_kept_as_are_to_do(num_plans, groups):
    """With two plans ahead every result leaves at once."""
    answers = expecting(*[DECODE] * num_plans)
    told = ["".join(leaving(answers, str(number))) for number in range(1, num_plans + 1)]
    assert [group for group in told if group] == groups


@pytest.mark.parametrize("others", [OTHERS, CHUNK, []])
def test_only_a_step_that_decodes_the_same_rows_is_waited_for(others):
    """Should it break the executor, the oldest step without an answer says which rows it ran."""
    assert leaving(expecting(DECODE, others, DECODE, DECODE), "1") == ("1",)
    assert leaving(expecting(others, DECODE, DECODE, DECODE), "1") == ("1",)
    assert leaving(expecting(DECODE, DECODE, others, DECODE), "1") == ()


def test_a_scheduler_of_an_earlier_protocol_gets_each_by_itself():
    """It knows no message of several results."""
    assert leaving(expecting(*[DECODE] * 4), "1", together=False) == ("1",)


def test_what_is_kept_leaves_when_it_is_asked_for():
    """Once."""
    answers = expecting(*[DECODE] * 4)
    assert leaving(answers, "1") == ()
    assert (answers.rest(), answers.rest()) == (("1",), ())
    assert (leaving(answers, "2"), leaving(answers, "3")) == ((), ("2", "3"))


@given(st.lists(st.sampled_from([DECODE, OTHERS, CHUNK]), min_size=1, max_size=12), st.data())
def test_every_result_leaves_once_and_in_order(schedules, data):
    """Whatever is planned meanwhile; nothing is kept when nothing is to do, and never more than is to do."""
    answers, told, num_expected = Answers(), [], 0
    for number in range(len(schedules)):
        while num_expected <= number or (num_expected < len(schedules) and data.draw(st.booleans())):
            answers.expect(plan(schedules[num_expected], step_id=num_expected + 1))
            num_expected += 1
        told += leaving(answers, number)
        assert number + 1 - len(told) < max(1, num_expected - number - 1)
    assert told == list(range(len(schedules)))

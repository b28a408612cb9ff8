"""All states of the protocol's models: nothing goes wrong in any, and something does without each safeguard."""

import pytest

from protocol_model.attach_state import Safeguard as AttachSafeguard
from protocol_model.bounds import Safeguard as BoundsSafeguard
from protocol_model.checker import Kind, Model, Rule, TooManyStatesError, explore
from protocol_model.resume_state import Safeguard as ResumeSafeguard
from protocol_model.scenarios import LONG, REVEALING, SHORT


def named(scenario):
    """The test's name."""
    return scenario.name


def counter(*rules, last=3, violation=lambda _: "", is_settled=lambda number: number == 3):
    """A model that is a number from 0 to `last`, with moves as (kind, from, to)."""

    def moves_of(kind):
        def moves(number):
            return [(f"{number} to {to}", (to,)) for each, start, to in rules if (each, start) == (kind, number)]

        return moves

    return Model((0,), tuple(Rule(kind, (0,), moves_of(kind)) for kind in Kind), violation, is_settled)


@pytest.mark.parametrize("scenario", SHORT, ids=named)
def test_no_reachable_state_is_wrong_or_without_a_way_to_a_good_end(scenario, capsys):
    """All states are visited, and there are about as many as there were: none was left out by mistake."""
    report = explore(scenario.model())
    with capsys.disabled():
        print(f"\n{scenario.name}: {report.num_states:,} states, {report.num_transitions:,} transitions")
    assert report.story == ()
    assert report.num_states > 0.8 * scenario.num_states


@pytest.mark.soak
@pytest.mark.parametrize("scenario", LONG, ids=named)
def test_no_state_is_wrong_after_more_faults(scenario):
    report = explore(scenario.model())
    assert report.story == ()
    assert report.num_states > 0.8 * scenario.num_states


@pytest.mark.parametrize("safeguard", REVEALING, ids=lambda safeguard: safeguard.name.lower())
def test_without_a_safeguard_the_checker_finds_a_story(safeguard):
    """Each is there for a reason, and the checker would notice if it were gone."""
    report = explore(REVEALING[safeguard].model(safeguard))
    assert any(line.startswith("=> ") for line in report.story)


def test_every_safeguard_has_a_scenario_that_needs_it():
    """None is only claimed."""
    assert set(REVEALING) == {*AttachSafeguard, *ResumeSafeguard, *BoundsSafeguard}


def test_a_violated_invariant_is_told_by_the_shortest_run():
    model = counter(
        *((Kind.STEP, 0, 1), (Kind.STEP, 1, 2), (Kind.STEP, 2, 3), (Kind.FAULT, 0, 2)),
        violation=lambda number: "three" * (number == 3),
    )
    assert explore(model).story == ("1. 0 to 2", "2. 2 to 3", "=> three:", "   3")


def test_a_state_where_nothing_can_happen_is_told_unless_it_is_a_good_end():
    assert "nothing can happen any more" in explore(counter((Kind.STEP, 0, 1))).story[1]
    assert explore(counter((Kind.STEP, 0, 3))).story == ()


def test_a_loop_without_a_way_out_is_told_though_a_fault_would_end_it():
    model = counter((Kind.STEP, 0, 1), (Kind.STEP, 1, 0), (Kind.FAULT, 1, 3))
    assert "no good end can be reached" in explore(model).story[-2]


def test_a_good_end_that_a_step_leaves_is_told_and_one_that_a_fault_leaves_is_not():
    """What is settled stays so by itself."""
    assert "upset" in explore(counter((Kind.STEP, 0, 3), (Kind.STEP, 3, 0))).story[1]
    assert explore(counter((Kind.STEP, 0, 3), (Kind.FAULT, 3, 0))).story == ()


def test_slow_steps_happen_only_where_no_step_does():
    report = explore(counter((Kind.STEP, 0, 1), (Kind.SLOW_STEP, 0, 2), (Kind.SLOW_STEP, 1, 3)))
    assert (report.num_states, report.story) == (3, ())


def test_a_model_that_is_too_large_is_refused():
    """A bound that does not bound would otherwise fill the memory."""
    with pytest.raises(TooManyStatesError):
        explore(counter((Kind.STEP, 0, 1), (Kind.STEP, 1, 2)), max_states=2)

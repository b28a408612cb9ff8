"""The product's own objects in every order of events: nothing goes wrong in any, and something does without each
safeguard.
"""

import pytest

from exhaustive.attach import attach_run
from exhaustive.gen import DrawnGen, Gen
from exhaustive.safeguards import SAFEGUARDS
from exhaustive.scenarios import REVEALING, SHORT, SLOW, SOAK

SOON_MISSED = ("line", "busy", "term", "yielding", "offset", "sync-gate", "stale-end", "leaving")


SCENARIOS = (
    *(pytest.param(scenario, id=scenario.name) for scenario in SHORT),
    *(pytest.param(scenario, id=scenario.name, marks=pytest.mark.slow) for scenario in SLOW),
    *(pytest.param(scenario, id=scenario.name, marks=pytest.mark.soak) for scenario in SOAK),
)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_nothing_goes_wrong_whatever_the_order(scenario):
    """There are about as many orders as there were: none was left out by mistake."""
    assert scenario.walk() > 0.8 * scenario.num_runs


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SOON_MISSED else pytest.mark.slow) for name in SAFEGUARDS]
)
def test_without_a_safeguard_something_goes_wrong(name):
    with SAFEGUARDS[name].active(), pytest.raises(AssertionError):
        REVEALING[name].walk()


def test_every_safeguard_has_a_scenario_that_needs_it():
    assert set(REVEALING) == set(SAFEGUARDS)


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", range(0, 200, 50))
def test_one_scheduler_comes_to_drive_all_executors_after_many_faults(first_seed):
    """More than all orders can be tried of: eight faults and four late messages, drawn."""
    for seed in range(first_seed, first_seed + 50):
        attach_run(DrawnGen(seed), {"crash": 4, "cut": 3, "takeover": 1, "late": 4}, is_settled=bool(seed % 2))


def test_all_combinations_of_choices_come_once():
    gen, found = Gen(), []
    for _ in gen.runs():
        first = gen.choice("ab")
        found.append((first, gen.int_inclusive(2) if first == "a" else gen.choice("xy")))
    assert found == [("a", 0), ("a", 1), ("a", 2), ("b", "x"), ("b", "y")]


def test_code_that_is_not_repeatable_is_refused():
    gen = Gen()
    runs = gen.runs()
    next(runs)
    gen.int_inclusive(1)
    next(runs)
    with pytest.raises(AssertionError, match="not repeatable"):
        gen.int_inclusive(2)

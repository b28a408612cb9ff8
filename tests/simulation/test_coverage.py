"""Which lines of the executor the simulation executes: nearly all of those that act on plans."""

import pytest

from simulation.coverage import FILES, LineCoverage
from simulation.run import run_seed


def test_one_seed_executes_lines_of_all_files():
    """A file that was renamed would be missing."""
    executed = LineCoverage()
    assert executed.share == pytest.approx(0.0)
    with executed.active():
        outcome, _ = run_seed(0, whole_story=False)
    assert not outcome.failures
    assert executed.share > 0.5
    assert str(executed).count(" lines  ") == len(FILES)


@pytest.mark.slow
def test_the_simulation_executes_what_executors_do_with_plans():
    """By 150 seeds. What is left refuses what no simulated scheduler sends, or names errors of a device."""
    executed = LineCoverage()
    with executed.active():
        for seed in range(150):
            outcome, _ = run_seed(seed)
            assert not outcome.failures
    assert executed.share >= 0.9, str(executed)

"""Which lines of the executor the simulation executes can be told.

Apart from the runs, which would take some times as long.
"""

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

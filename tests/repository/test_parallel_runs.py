"""`make test` runs in several processes, and tests that share something costly in one of them."""

import os
import subprocess
import sys

import pytest

# What pytest and pytest-xdist do together: only another version of them changes it.
pytestmark = [pytest.mark.lint, pytest.mark.slow]

TESTS = """
import os
import pathlib
import pytest


@pytest.mark.xdist_group("shared")
@pytest.mark.parametrize("number", range(6))
def test_it(number):
    pathlib.Path(f"{number}.txt").write_text(os.environ["PYTEST_XDIST_WORKER"])
"""


def test_a_group_is_kept_together(tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "test_it.py"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    processes = [path.read_text(encoding="utf-8") for path in tmp_path.glob("*.txt")]
    assert len(processes) == 6
    assert len(set(processes)) == 1

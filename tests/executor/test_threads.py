"""How the threads of a CPU device wait for each other."""

import os
import subprocess
import sys

import pytest

from paceline_executor.config import let_waiting_threads_sleep

PROGRAM = """
import sys
import paceline_executor.__main__
from paceline_executor.config import let_waiting_threads_sleep

assert "torch" not in sys.modules, "afterwards it would be too late"
let_waiting_threads_sleep()
import torch

torch.ones(512, 512) @ torch.ones(512, 512)
"""


@pytest.mark.parametrize(
    ("chosen", "spins"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
    ids=["nothing", "spins", "policy"],
)
def test_threads_that_wait_sleep_soon_unless_the_user_says_otherwise(monkeypatch, chosen, spins):
    environment = dict(chosen)
    monkeypatch.setattr(os, "environ", environment)
    let_waiting_threads_sleep()
    assert environment.get("GOMP_SPINCOUNT") == spins


def test_the_program_decides_it_before_torch_is_imported():
    """OpenMP's runtime reports what it goes by when it is loaded."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP", "OMP"))}
    environment = inherited | {"OMP_DISPLAY_ENV": "verbose"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert "GOMP_SPINCOUNT = '1000'" in done.stderr

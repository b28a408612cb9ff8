"""How the threads of a CPU device wait for each other."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os
from paceline_executor.config import let_waiting_threads_sleep

let_waiting_threads_sleep()
import torch

torch.ones(512, 512) @ torch.ones(512, 512)
print(os.environ.get("GOMP_SPINCOUNT"))
"""


@pytest.mark.parametrize(
    ("chosen", "spins"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
    ids=["nothing", "spins", "policy"],
)
def test_threads_that_wait_sleep_soon_unless_the_user_says_otherwise(chosen, spins):
    """OpenMP's runtime reports what it goes by when it is loaded, as the program's own output tells what is set."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP", "OMP"))}
    environment = inherited | {"OMP_DISPLAY_ENV": "verbose"} | chosen
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [spins]
    if spins != "None":
        assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr


def test_the_program_decides_it_before_torch_is_imported():
    """Afterwards it would be too late."""
    code = "import sys, paceline_executor.__main__, paceline_executor.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

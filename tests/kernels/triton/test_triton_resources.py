"""Every GPU kernel with every entry of its launch table compiles ahead of time, and fits the GPU it is compiled for.

The tables `resources_sm_80.csv` and `resources_sm_90.csv` are the output of `python -m kernel_resources sm_80` and of
sm_90: a change of theirs is looked at by whoever makes it. Registers are a compiler's choice, so they are compared only
with the version of Triton that the tables were made with.
"""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

# Of a program, in bytes, by the CUDA C++ programming guide: the multiprocessor's shared memory but for 1 KiB.
MAX_SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024}
REGISTERS_OF_A_MULTIPROCESSOR = 65_536
TABLES_ARE_OF = "3.6.0"


# Each is compiled in one of the processes that share the tests, and once.
ARCHITECTURES = [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in ("sm_80", "sm_90")]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def architecture(request):
    """The two that have launch tables."""
    return request.param


@pytest.fixture(scope="module")
def compiled(architecture, tmp_path_factory, pytestconfig):
    """What every kernel takes, found in a process that has no interpreter."""
    cache = pytestconfig.cache.mkdir("triton") if pytestconfig.cache else tmp_path_factory.mktemp("triton")
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-m", "kernel_resources", architecture]
    return rows(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def rows(table):
    """A table as dictionaries, whose numbers are numbers."""
    lines = csv.DictReader(table.splitlines())
    return [{name: int(value) if value.isdigit() else value for name, value in line.items()} for line in lines]


def test_every_kernel_fits_its_gpu(architecture, compiled):
    """Nothing is spilled to memory, and a program's registers and shared memory are those of one multiprocessor."""
    for row in compiled:
        assert row["spilled_bytes"] == 0, row
        assert row["shared_bytes"] <= MAX_SHARED_BYTES[architecture], row
        assert row["registers"] * row["num_warps"] * 32 <= REGISTERS_OF_A_MULTIPROCESSOR, row


@pytest.mark.skipif(triton.__version__ != TABLES_ARE_OF, reason=f"the tables were made with Triton {TABLES_ARE_OF}")
def test_resources_are_those_of_the_table(architecture, compiled):
    """A kernel that needs more registers than before shows in a review."""
    table = Path(__file__).with_name(f"resources_{architecture}.csv")
    assert compiled == rows(table.read_text(encoding="utf-8"))

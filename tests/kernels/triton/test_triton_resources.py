"""Every GPU kernel with every entry of its launch table compiles ahead of time, and fits the GPU it is compiled for.

The tables `resources_sm_80.csv` and `resources_sm_90.csv` are the output of `python -m kernel_resources sm_80` and of
sm_90: a change of theirs is looked at by whoever makes it. They say what each kernel was compiled from, and what has
not changed since is not compiled again; with `--soak` everything is. Registers are a compiler's choice, so they are
compared only with the version of Triton that the tables were made with.
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
same_triton = pytest.mark.skipif(
    triton.__version__ != TABLES_ARE_OF, reason=f"the tables were made with Triton {TABLES_ARE_OF}"
)

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
    environment = compiling() | {"TRITON_CACHE_DIR": str(cache)}
    known = () if pytestconfig.getoption("--soak") else (table_of(architecture),)
    return rows(made_anew(architecture, *known, environment=environment))


def compiling():
    """The environment of a process that compiles kernels."""
    return os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def made_anew(architecture, *known, environment):
    """The table that the command prints."""
    command = [sys.executable, "-m", "kernel_resources", architecture, *known]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def table_of(architecture):
    """The committed one."""
    return Path(__file__).with_name(f"resources_{architecture}.csv")


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


@same_triton
def test_resources_are_those_of_the_table(architecture, compiled):
    """A kernel that needs more registers than before shows in a review; where its code changed, make the table anew."""
    assert compiled == rows(table_of(architecture).read_text(encoding="utf-8"))


@same_triton
def test_only_code_that_changed_is_compiled_again(tmp_path):
    """What a table says of the same code is believed, even what no compiler says; of other code it is not."""
    table = rows(table_of("sm_90").read_text(encoding="utf-8"))
    believed, changed = (next(row for row in table if row["case"] == case) for case in ("softcap", "take rows"))
    believed["registers"] = 999
    spoilt = tmp_path / "spoilt.csv"
    with spoilt.open("w", encoding="utf-8") as file:
        writer = csv.DictWriter(file, table[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(row | {"registers": 998, "code": "other"} if row is changed else row for row in table)
    assert rows(made_anew("sm_90", spoilt, environment=compiling())) == table

"""Every GPU kernel with every entry of its launch table compiles ahead of time, and fits the GPU it is compiled for.

The tables `resources_sm_80.csv` and so on are the output of `python -m kernel_resources sm_80`, and so on: a change of
theirs is looked at by whoever makes it. They say what each kernel was compiled from, and what has not changed since is
not compiled again; with `--tier soak` everything is. Registers are a compiler's choice, so they are
compared only with the version of Triton that the tables were made with.
"""

import csv
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import triton

from kernel_resources import compiling
from kernel_resources.case import Case
from paceline_kernels.gpu.architecture import Architecture, table_of

# Of a program, in bytes, by the CUDA C++ programming guide: the multiprocessor's shared memory but for 1 KiB.
_LITTLE, _MUCH = 99 * 1024, 227 * 1024
MAX_SHARED_BYTES = {
    "sm_80": _LITTLE,  # it has 163 KiB, but GPUs that take its launch table have no more than this
    "sm_86": _LITTLE,
    "sm_89": _LITTLE,
    "sm_90": _MUCH,
    "sm_100": _MUCH,
    "sm_120": _LITTLE,
}
# What is allowed to spill because it was measured to be faster than what does not: 971 us with 4 warps, 1,165 with 8
# that spill nothing (`kernels/MEASURED.md`).
MEASURED_SPILLS = {("sm_90", "attention 256 bfloat16 blocks of 64", "attend_splits"): 104}
REGISTERS_OF_A_MULTIPROCESSOR = 65_536
TABLES_ARE_OF = "3.6.0"
same_triton = pytest.mark.skipif(
    triton.__version__ != TABLES_ARE_OF, reason=f"the tables were made with Triton {TABLES_ARE_OF}"
)


HAVE_LAUNCH_TABLES = ("sm_80", "sm_90")  # other GPUs take one of these


# Each is compiled once, in one of the processes that share the tests.
TABLES = [pytest.param(each, marks=pytest.mark.xdist_group(each)) for each in MAX_SHARED_BYTES]


@pytest.fixture(scope="module")
def compile_all(tmp_path_factory, pytestconfig):
    """What every kernel takes, found in a process that has no interpreter."""
    folder = pytestconfig.cache.mkdir("triton") if pytestconfig.cache else tmp_path_factory.mktemp("triton")
    environment = compiling_environment() | {"TRITON_CACHE_DIR": str(folder)}

    @cache
    def compiled(architecture):
        table = table_path(architecture)
        known = () if pytestconfig.getoption("--tier") == "soak" or not table.exists() else (table,)
        return rows(made_anew(architecture, *known, environment=environment))

    return compiled


def compiling_environment():
    """The environment of a process that compiles kernels."""
    return os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def made_anew(architecture, *known, environment):
    """The table that the command prints."""
    command = [sys.executable, "-m", "kernel_resources", architecture, *known]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def table_path(architecture):
    """The committed one."""
    return Path(__file__).with_name(f"resources_{architecture}.csv")


def rows(table):
    """A table as dictionaries, whose numbers are numbers."""
    lines = csv.DictReader(table.splitlines())
    return [{name: int(value) if value.isdigit() else value for name, value in line.items()} for line in lines]


@pytest.mark.parametrize("architecture", TABLES)
def test_every_kernel_fits_its_gpu(architecture, compile_all):
    """A program's registers and shared memory are those of one multiprocessor; where a launch table was made for the
    GPU, nothing is spilled to memory but for `MEASURED_SPILLS`.
    """
    for row in compile_all(architecture):
        spill = MEASURED_SPILLS.get((architecture, row["case"], row["kernel"]), 0)
        assert row["spilled_bytes"] <= spill or architecture not in HAVE_LAUNCH_TABLES, row
        assert row["shared_bytes"] <= MAX_SHARED_BYTES[architecture], row
        assert row["registers"] * row["num_warps"] * 32 <= REGISTERS_OF_A_MULTIPROCESSOR, row


@same_triton
@pytest.mark.parametrize("architecture", TABLES)
def test_resources_are_those_of_the_table(architecture, compile_all):
    assert compile_all(architecture) == rows(table_path(architecture).read_text(encoding="utf-8"))


def test_a_gpu_uses_the_table_whose_launches_fit_it():
    """Those of 12.0 and later have the shared memory of 8.9."""
    assert {table_of(capability) for capability in (80, 86, 89, 120, 121)} == {Architecture.SM_80}
    assert {table_of(capability) for capability in (90, 100, 103)} == {Architecture.SM_90}


def test_only_code_that_changed_is_compiled_again(monkeypatch):
    """What a table says of the same code is believed, even what no compiler says; of other code it is not."""

    def resources(name, code, registers):
        return compiling.Resources(name, "kernel", 4, registers, 0, 0, code)

    monkeypatch.setattr(compiling, "_codes", lambda case: {"kernel": f"code of {case.name}"})
    monkeypatch.setattr(compiling, "_compile", lambda case, codes: [resources(case.name, codes["kernel"], 32)])
    known = [resources("same", "code of same", 999), resources("changed", "what it was", 998)]
    found = list(compiling.resources_of([Case(name, None) for name in ("same", "changed", "new")], known))
    assert [(row.case, row.registers) for row in found] == [("same", 999), ("changed", 32), ("new", 32)]

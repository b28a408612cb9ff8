"""Compiled functions that are called by name: what they compute and refuse, for whatever types, also from disk."""

import subprocess
import sys

import numpy as np
import pytest
from numba import types

from paceline_kernels.compiler import jit
from paceline_kernels.compiler.extern_calls import called_by_name, linked_to


@jit.compiled
def add_at(sums, index, value):
    """Add to one place; nothing is at a negative one."""
    if index < 0:
        raise IndexError("nothing is there")
    sums[index] += value


add_by_name = called_by_name(add_at)


@linked_to(add_at, kinds_of=lambda of_caller: (of_caller[0], types.int64, of_caller[1]))
@jit.compiled_for_python
def add_everywhere(sums, value, first):
    """Call the function for every place from one on."""
    for index in range(first, sums.shape[0]):
        add_by_name(sums, index, value)


@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_callers_of_any_types_find_the_function_of_theirs(dtype):
    sums = np.arange(5, dtype=dtype)
    for _ in range(2):
        add_everywhere(sums, sums[1], 0)
    assert sums.tolist() == [3, 4, 5, 6, 7]


def test_errors_reach_the_caller():
    with pytest.raises(IndexError, match="nothing is there"):
        add_everywhere(np.zeros(2), 1.0, -1)


def test_what_another_process_compiled_is_found():
    """Neither of them compiles anything: `only_kept` refuses what would have to be."""
    add_everywhere(np.zeros(2), 1.0, 0)
    source = """
import numpy as np
from paceline_kernels.compiler import jit
from tests.kernels.cpu.test_extern_calls import add_everywhere
sums = np.zeros(3)
with jit.only_kept():
    add_everywhere(sums, 2.0, 1)
print(sums.tolist())
"""
    found = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert found.stdout == "[0.0, 2.0, 2.0]\n", found.stderr

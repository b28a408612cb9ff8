"""Of processes that need the same compiled code one compiles it; whatever becomes of that one, the others go on."""

import subprocess
import sys
import time
from contextlib import contextmanager

import numba
import pytest

from paceline_kernels.compiler import jit
from paceline_kernels.compiler.compile_lock import CompileLock

MODULE = """
def double(x):
    return 2 * x

def broken(x):
    return x.no_such_thing
"""
# Holds a lock until it is killed.
HOLDER = """
import sys, time
from pathlib import Path
from paceline_kernels.compiler.compile_lock import CompileLock
print(CompileLock().take(Path(sys.argv[1]), sys.argv[2]), flush=True)
time.sleep(60)
"""
# Compiles `double`, and says what it waits for and how often it found compiled code.
COMPILER = """
import logging, sys
sys.path.insert(0, sys.argv[1])
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
from paceline_kernels.compiler import jit
jit._config.CACHE_DIR = sys.argv[1]
import doubling
double = jit.compiled_for_python(doubling.double)
print("ready", flush=True)
assert double(21) == 42
print(sum(double.stats.cache_hits.values()), "loaded", flush=True)
"""


@contextmanager
def process(code, *arguments):
    """A process whose lines can be read; killed in the end."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


@pytest.fixture
def file(tmp_path):
    """A file with locks."""
    return tmp_path / "paceline.lock"


@pytest.fixture
def doubling(tmp_path, monkeypatch):
    """A module whose compiled functions are kept in a folder of their own, as those of other processes are."""
    (tmp_path / "doubling.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(jit._config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(jit, "_lock", CompileLock())
    yield __import__("doubling")
    del sys.modules["doubling"]


def name_of(dispatcher):
    """The name of a function's lock."""
    return dispatcher._cache._place()[1]


def is_free(file, name):
    """Whether another process gets the lock, waiting for it or not."""
    with process(HOLDER.replace("CompileLock()", "CompileLock(0)"), file, name) as other:
        return other.stdout.readline() == "True\n"


def test_who_comes_second_waits_and_loads(doubling, tmp_path, file):
    """It would compile what it does not find, were it not told that somebody does so already."""
    double = jit.compiled_for_python(doubling.double)
    jit._lock.take(file, name_of(double))  # as when compiling has begun
    with process(COMPILER, tmp_path) as second:
        assert second.stdout.readline() == "ready\n"
        assert "another process compiles" in second.stdout.readline()
        double(21)
        assert second.stdout.readline() == "1 loaded\n"


def test_what_is_found_takes_no_lock(doubling, monkeypatch):
    """A start with everything on disk waits for nobody."""
    jit.compiled_for_python(doubling.double)(21)
    monkeypatch.setattr(CompileLock, "take", None)
    again = jit.compiled_for_python(doubling.double)
    assert again(21) == 42
    assert sum(again.stats.cache_hits.values()) == 1


def test_what_cannot_be_compiled_leaves_others_able_to_try(doubling, file):
    broken = jit.compiled_for_python(doubling.broken)
    with pytest.raises(numba.TypingError):
        broken(21)
    assert is_free(file, name_of(broken))


def test_a_file_that_cannot_be_locked_costs_nothing_but_the_lock(doubling, file):
    """As where the file system has no locks: here a folder has the file's name."""
    file.mkdir()
    assert jit.compiled_for_python(doubling.double)(21) == 42


def test_a_lock_ends_with_its_process(file):
    """kill -9, while others wait."""
    with process(HOLDER, file, "double") as other:
        assert other.stdout.readline() == "True\n"
        other.kill()
        assert CompileLock().take(file, "double")


def test_other_names_are_other_locks(file):
    lock = CompileLock()
    lock.take(file, "double")
    assert (is_free(file, "double"), is_free(file, "triple")) == (False, True)
    lock.release(file, "double")
    assert is_free(file, "double")


def test_patience_ends_once_and_for_all(file, monkeypatch):
    """A holder that was stopped costs one wait, not one for each function."""
    with process(HOLDER, file, "double") as other:
        other.stdout.readline()
        lock = CompileLock(0)
        assert not lock.take(file, "double")
        monkeypatch.setattr(time, "monotonic", None)
        assert not lock.take(file, "double")

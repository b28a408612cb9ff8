"""Compiled kernels are kept on disk; a disk that cannot keep them costs time, and nothing else."""

import importlib.util
import logging
import os
import resource
from contextlib import contextmanager

import pytest

from paceline_kernels.compiler import jit

MODULE = "def double(x):\n    return 2 * x\n"


@pytest.fixture
def fresh(tmp_path, monkeypatch, caplog):
    """Returns the same function, newly compiled, whenever it is called; warnings are heard."""
    monkeypatch.setattr(jit._config, "CACHE_DIR", str(tmp_path / "cache"))
    jit._tell_not_kept.cache_clear()
    caplog.set_level(logging.WARNING)
    (tmp_path / "double.py").write_text(MODULE)

    def fresh():
        spec = importlib.util.spec_from_file_location("double", tmp_path / "double.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return jit.compiled_for_python(module.double)

    return fresh


@contextmanager
def no_room():
    """Files of this process grow to 100 bytes at most, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_told_once(fresh, caplog):
    with no_room():
        double = fresh()
        results = double(21), double(0.5)
    assert results == (42, 1.0)
    assert caplog.text.count("compiled kernels are not kept") == len(caplog.records) == 1


def test_what_was_cut_on_disk_is_compiled_and_kept_again(fresh, caplog, tmp_path):
    assert fresh()(21) == 42
    kept = [path for path in (tmp_path / "cache").rglob("*") if path.suffix in (".nbi", ".nbc")]
    assert len(kept) == 2  # an index, and what is compiled
    for path in kept:
        os.truncate(path, 0)
    assert fresh()(21) == 42
    assert "are damaged" in caplog.text
    again = fresh()
    assert again(21) == 42
    assert sum(again.stats.cache_hits.values()) == 1

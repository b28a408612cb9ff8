"""How kernels are compiled: kept on disk where that is possible, recompiled when what they share changes."""

import logging
from pathlib import Path

import pytest

from paceline_kernels.compiler import jit


def double(x):
    """Twice x."""
    return x + x


def thrice(x):
    """Three times x; one test alone compiles it."""
    return x + x + x


def called_twice(inner):
    """Compiled code that calls compiled code."""

    @jit.compiled_for_python
    def call(x):
        return inner(inner(x))

    return call


def test_compiled_functions_compute():
    assert jit.compiled_for_python(double)(21) == 42


def test_what_only_compiled_code_calls_is_refused_to_python():
    """By name: without what Python calls a function by, numba would jump to nowhere."""
    inner = jit.compiled(double)
    assert called_twice(inner)(21) == 84
    with pytest.raises(TypeError, match=r"double.*compiled_for_python"):
        inner(21)


def test_a_function_is_kept_for_compiled_code_and_for_python_apart():
    assert called_twice(jit.compiled(thrice))(5) == 45
    assert jit.compiled_for_python(thrice)(5) == 15


def test_a_place_that_cannot_be_written_to_costs_the_cache_and_nothing_else(monkeypatch, caplog):
    """As in a container with a read-only file system and no home: compiled at every start, and said so."""
    njit = jit._numba_njit

    def njit_without_a_place(*, cache, **options):
        if cache:
            raise RuntimeError("no locator available")
        return njit(cache=cache, **options)

    monkeypatch.setattr(jit, "_numba_njit", njit_without_a_place)
    with caplog.at_level(logging.WARNING):
        assert jit.compiled_for_python(double)(21) == 42
    assert "every start compiles them: no folder" in caplog.text


def test_the_cache_is_keyed_by_all_files_of_the_package(monkeypatch, tmp_path):
    monkeypatch.setattr(jit, "__file__", str(tmp_path / "jit.py"))
    (tmp_path / "linear").mkdir()
    for source in (tmp_path / "simd.py", tmp_path / "linear" / "cpu.py"):
        before = jit._cache_folder()
        source.write_text("LANES = 8")
        assert jit._cache_folder() != before
    before = jit._cache_folder()
    (tmp_path / "linear" / "notes.txt").write_text("x")
    assert jit._cache_folder() == before
    (tmp_path / "linear" / "cpu.py").write_text("LANES = 4")
    assert jit._cache_folder() != before


def test_a_cache_elsewhere_has_the_same_key():
    assert jit._cache_folder("/elsewhere") == f"/elsewhere/{Path(jit._cache_folder()).name}"

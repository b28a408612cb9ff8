"""Operations are compiled by a process of its own, which this one then finds on disk."""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline_kernels.compiler import jit
from paceline_kernels.warm_up import compile_process
from paceline_kernels.warm_up.compile_process import have_ready

OPERATION = "gate_and_multiply"
HAVE_READY = f"""
from paceline_kernels.warm_up.compile_process import have_ready
from paceline_kernels.activation.cpu import gate_rows
have_ready(["{OPERATION}"], lambda name, _: print("begins", name))
print(sum(gate_rows.stats.cache_misses.values()), sum(gate_rows.stats.cache_hits.values()))
"""


@pytest.fixture
def nothing_kept(tmp_path):
    """An environment in which no compiled code is on disk yet."""
    return {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}


def test_what_is_not_on_disk_another_process_compiles(nothing_kept):
    """Once: the next start finds it. What libraries print in the other process is no operation."""

    def start(**asked):
        command = [sys.executable, "-c", HAVE_READY]
        return subprocess.run(command, env=nothing_kept | asked, check=True, capture_output=True, text=True)

    first, second = start(NUMBA_DEBUG_CACHE="1"), start()
    told = [line for line in first.stdout.splitlines() if line.startswith("begins")]
    assert told == [f"begins {OPERATION}"] * 3  # looked for, compiled, read
    assert first.stdout.endswith("\n0 1\n")
    assert second.stdout.splitlines() == [f"begins {OPERATION}", "0 1"]
    assert (first.stderr, second.stderr) == ("", "")


def test_who_compiles_ends_with_the_process_that_waits_for_it(nothing_kept, tmp_path):
    script = "from paceline_kernels.warm_up.compile_process import have_ready\nhave_ready(['decoder over int8'], print)"
    told = [b"decoder over int8 False\n", b"decoder over int8 True\n"]
    command = [sys.executable, "-u", "-c", script]
    with subprocess.Popen(command, env=nothing_kept, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert [process.stdout.readline() for _ in range(2)] == told
        process.kill()
        assert process.stderr.read() == b""
    assert not list(tmp_path.rglob("cpu.run-*.nbc"))


def test_who_compiles_says_nothing_where_ctrl_c_ends_all_of_a_terminal(nothing_kept):
    """At any moment, so also while it is still being imported."""
    script = "import os, signal; signal.signal(signal.SIGINT, lambda *_: os._exit(0))\n" + HAVE_READY
    command = [sys.executable, "-u", "-c", script]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=nothing_kept, process_group=0, **pipes) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not any("libtorch" in Path(f"/proc/{child}/maps").read_text() for child in children.read_text().split()):
            assert process.poll() is None
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        assert process.stderr.read() == b""


def test_who_compiles_for_nobody_any_more_says_nothing():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "paceline_kernels.warm_up.compile_process", OPERATION]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")


@pytest.mark.parametrize("program", ["/bin/false", "/nowhere/python"], ids=["fails", "is missing"])
def test_where_no_other_process_compiles_this_one_does(program, monkeypatch, caplog):
    called, told = [], []
    monkeypatch.setattr(compile_process, "_is_kept", lambda _: False)
    monkeypatch.setattr(compile_process, "CPU_CALLS", {OPERATION: lambda: called.append(OPERATION)})
    monkeypatch.setattr(sys, "executable", program)
    with caplog.at_level(logging.WARNING):
        have_ready([OPERATION], lambda name, _: told.append(name))
    assert called == [OPERATION]
    assert told == [OPERATION, OPERATION]
    assert len(caplog.records) == 1
    assert "this one" in caplog.text


def test_nothing_is_compiled_where_only_what_is_kept_is_wanted(monkeypatch, tmp_path):
    monkeypatch.setattr(jit._config, "CACHE_DIR", str(tmp_path))

    def double(x):
        return 2 * x

    compiled = jit.compiled_for_python(double)
    with jit.only_kept(), pytest.raises(jit.NotKeptError, match="double"):
        compiled(21)
    assert compiled(21) == 42

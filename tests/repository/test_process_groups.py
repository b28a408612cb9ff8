"""What a benchmark starts ends with it: by a signal, and when its time is up."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from process_groups import run_program
from repository_checks.sources import ROOT

# A program with a child of its own, which writes the child's number and goes on for ever.
PARENT = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid) + "\\n")
time.sleep(600)
"""
BENCHMARK = """
import sys
from process_groups import end_with_what_was_started, run_program
end_with_what_was_started()
run_program([sys.executable, "-c", *sys.argv[1:]])
"""


def wait_for_end(pid):
    """Returns once a process is gone, or a zombie."""
    stat = Path(f"/proc/{pid}/stat")
    while stat.exists() and stat.read_text(encoding="utf-8").split()[2] != "Z":
        time.sleep(0.01)


def number_in(file):
    while not file.exists() or not file.read_text(encoding="utf-8").endswith("\n"):
        time.sleep(0.01)
    return int(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_benchmark_that_is_interrupted_ends_all_processes(number, tmp_path):
    command = [sys.executable, "-c", BENCHMARK, PARENT, str(tmp_path / "pid")]
    benchmark = subprocess.Popen(command, env={"PYTHONPATH": str(ROOT / "tests" / "bench")}, stderr=subprocess.DEVNULL)
    child = number_in(tmp_path / "pid")
    benchmark.send_signal(number)
    assert benchmark.wait() != 0
    wait_for_end(child)


def test_a_program_that_takes_too_long_is_ended_with_all_it_started(tmp_path):
    assert run_program([sys.executable, "-c", PARENT, str(tmp_path / "pid")], limit_s=5.0).code is None
    wait_for_end(number_in(tmp_path / "pid"))

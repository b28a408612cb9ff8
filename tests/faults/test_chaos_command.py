"""`paceline chaos` with stand-ins for the services: what it prints, and when it ends with which exit code."""

import json
import os
import select
import sys
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline_cli.app import app
from paceline_cli.chaos.faults import FaultKind
from paceline_cli.commands.chaos import kinds_in_turn, parse_kinds
from paceline_cli.supervisor import programs

FAKE_SERVICES = Path(__file__).with_name("fake_chaos_services.py")
OPTIONS = ["--streams", "4", "--pause", "0.1", "--executors", "2"]


@pytest.fixture
def chaos(tmp_path, monkeypatch):

    def run(*options, forgetful=False, invoke=lambda arguments: CliRunner().invoke(app, arguments)):
        for name in ("scheduler", "executor"):
            script = tmp_path / f"paceline-{name}"
            variable = f"FORGETFUL={tmp_path / 'marker'} " if forgetful else ""
            script.write_text(f'#!/bin/sh\n{variable}exec "{sys.executable}" "{FAKE_SERVICES}" {name} "$@"\n')
            script.chmod(0o755)
        monkeypatch.setattr(programs, "find_script", lambda name: str(tmp_path / name))
        return invoke(["chaos", *OPTIONS, *options])

    return run


def test_a_system_that_loses_nothing_is_exit_code_0(chaos, tmp_path):
    figures = tmp_path / "figures.json"
    kinds = "scheduler-kill,executor-freeze,client-cut,client-delay"
    result = chaos("--faults", kinds, "--count", "4", "--json", str(figures))
    assert result.exit_code == 0, result.output
    assert "4/4 " in result.stderr
    assert "4 faults, " in result.stdout
    assert "0 failed, 0 lost, 0 doubled, 0 changed." in result.stdout
    report = json.loads(figures.read_text())
    assert {fault["kind"] for fault in report["faults"]} == {"(no fault)", *kinds.split(",")}
    assert sum(kind["num_done"] for kind in report["kinds"]) > 0


def test_a_system_that_changes_tokens_is_exit_code_1(chaos):
    """Its scheduler remembers nothing and answers otherwise after a restart; the first flaw is told in words."""
    result = chaos("--faults", "scheduler-kill", "--count", "1", forgetful=True)
    assert result.exit_code == 1, result.output
    assert "something failed, was lost, doubled or changed" in result.stderr
    assert "the first that was wrong was " in result.stdout


def test_figures_that_cannot_be_written_are_exit_code_74_and_keep_no_fault_waiting(chaos, monkeypatch, tmp_path):
    """Nor do lines of its progress that nobody reads."""
    figures, (reading, writing) = tmp_path / "figures.json", os.pipe()
    while select.select((), (writing,), (), 0)[1]:
        os.write(writing, b"\n" * select.PIPE_BUF)
    with Path("/dev/full").open("w") as full, os.fdopen(writing, "w") as clogged:
        monkeypatch.setattr("sys.stdout", full)
        monkeypatch.setattr("sys.stderr", clogged)
        with pytest.raises(SystemExit) as end:
            chaos("--faults", "scheduler-kill", "--count", "1", "--json", str(figures), invoke=app)
        os.close(reading)
        for writer in [thread for thread in threading.enumerate() if thread.name == "logs"]:
            writer.join()
    assert end.value.code == 74
    assert json.loads(figures.read_text())["faults"][-1]["kind"] == "scheduler-kill"


def test_a_fault_that_does_not_exist_is_a_wrong_use(chaos):
    result = chaos("--faults", "scheduler-kill,flood")
    assert result.exit_code == 2
    assert "there is no fault 'flood'" in " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--faults", "rank-kill"], "rank-kill needs executors of several ranks: see --tensor-parallel-size"),
        (["--tensor-parallel-size", "3,x"], "--tensor-parallel-size takes numbers"),
    ],
)
def test_what_needs_ranks_says_so(options, sentence, chaos):
    result = chaos(*options)
    assert result.exit_code == 2
    assert sentence in " ".join(result.stderr.replace("│", " ").split())


def test_all_means_every_fault_that_can_be_done():
    assert parse_kinds("all", has_ranks=True) == tuple(FaultKind)
    rank_faults = {FaultKind.RANK_KILL, FaultKind.RANK_FREEZE}
    assert set(FaultKind) - {*parse_kinds("all", has_ranks=False)} == rank_faults
    assert {*parse_kinds(None, has_ranks=True)} - {*parse_kinds(None, has_ranks=False)} == rank_faults


def test_faults_come_in_turn():
    kinds = (FaultKind.RIVAL, FaultKind.BOTH_KILL, FaultKind.CLIENT_CUT)
    order = list(kinds_in_turn(kinds, 7, None, seed=3))
    assert len(order) == 7
    assert set(order[:3]) == set(order[3:6]) == set(kinds)
    assert order == list(kinds_in_turn(kinds, 7, None, seed=3))


def test_no_fault_begins_when_the_time_is_up():
    assert list(kinds_in_turn((FaultKind.RIVAL,), None, 0.0, seed=1)) == []

"""Exit codes mean the same everywhere, and what starts processes again is told which of them are final."""

import re
import shutil
import subprocess

import pytest

from paceline_cli.supervisor.restart_policy import FINAL_EXIT_CODES, GiveUp, RestartAt, RestartPolicy
from paceline_executor.__main__ import ExitCode as ExecutorCode
from paceline_executor.config import parse_config as parse_executor
from paceline_scheduler.__main__ import ExitCode as SchedulerCode
from repository_checks.programs import BIN
from repository_checks.sources import ROOT

FINAL = {ExecutorCode.USAGE, ExecutorCode.MODEL, ExecutorCode.MACHINE}
UNIT = re.search(r"```text\n(\[Unit\].*?)```", (ROOT / "OPERATING.md").read_text(encoding="utf-8"), re.DOTALL)[1]


def test_the_services_agree_on_their_codes():
    assert {code.name: code.value for code in SchedulerCode}.items() <= {
        code.name: code.value for code in ExecutorCode
    }.items()


@pytest.mark.parametrize("code", list(ExecutorCode), ids=lambda code: code.name)
def test_what_is_final_is_said_where_it_counts(code):
    assert (code in FINAL_EXIT_CODES) is (code in FINAL)
    first, later = RestartPolicy(), RestartPolicy()
    later.became_ready(0.0)
    ends_first_start = code in FINAL | {ExecutorCode.PORT, ExecutorCode.FETCH}
    assert isinstance(first.exited(code, 10.0), GiveUp if ends_first_start else RestartAt)
    assert later.exited(code, 10.0) == RestartAt(10.0)


def test_the_unit_of_the_readme_starts_again_what_may_work():
    [codes] = re.findall(r"^RestartPreventExitStatus=(.*)$", UNIT, re.MULTILINE)
    assert {int(code) for code in codes.split()} == FINAL
    [options] = re.findall(r"^ExecStart=/opt/paceline/bin/paceline-executor (.*)$", UNIT, re.MULTILINE)
    assert parse_executor(options.split()).model == "smollm2-135m-instruct"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_unit_of_the_readme(tmp_path):
    unit = tmp_path / "paceline-executor.service"
    unit.write_text(UNIT.replace("/opt/paceline/bin", str(BIN)))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")

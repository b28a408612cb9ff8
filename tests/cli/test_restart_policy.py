"""When a process that ended is started again, told by a clock that only moves by hand, and what exit codes say of it.

They mean the same everywhere, and whatever else starts processes again is told which of them are final.
"""

import re
import shutil
import subprocess

import pytest

from paceline.process.command import ExitCode
from paceline_cli.supervisor.restart_policy import FINAL_EXIT_CODES, GiveUp, RestartAt, RestartPolicy
from paceline_executor.config import parse_config as parse_executor
from repository_checks.programs import BIN
from repository_checks.sources import ROOT

CRASH = 1
KILLED = -9
FINAL = {ExitCode.USAGE, ExitCode.MODEL, ExitCode.MACHINE}
UNIT = re.search(r"```text\n(\[Unit\].*?)```", (ROOT / "OPERATING.md").read_text(encoding="utf-8"), re.DOTALL)[1]


def pauses_of_failures(policy, num_failures, now=100.0):
    """How long each of several failed starts in a row is waited for."""
    pauses = []
    for _ in range(num_failures):
        verdict = policy.exited(CRASH, now)
        pauses.append(verdict.seconds - now)
        now = verdict.seconds
    return pauses


def test_a_process_that_served_is_started_again_at_once():
    policy = RestartPolicy()
    for start in (5.0, 6.0, 8.0):
        policy.became_ready(start)
        assert policy.exited(KILLED, start + 1.0) == RestartAt(start + 1.0)


def test_a_process_that_ends_as_soon_as_it_is_ready_is_not_started_without_end():
    policy, now, pauses = RestartPolicy(), 100.0, []
    for _ in range(9):
        policy.became_ready(now)
        verdict = policy.exited(CRASH, now + 0.9)
        pauses.append(verdict.seconds - (now + 0.9))
        now = verdict.seconds
    assert pauses == pytest.approx([0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10])


def test_having_served_makes_up_for_ending_early():
    policy = RestartPolicy()
    for start, end, pause in ((0.0, 0.1, 0.0), (1.0, 1.1, 0.1), (2.0, 3.0, 0.0), (4.0, 4.1, 0.0), (5.0, 5.1, 0.1)):
        policy.became_ready(start)
        assert policy.exited(CRASH, end) == RestartAt(end + pause)


def test_failing_to_start_between_two_early_ends_makes_up_for_nothing():
    policy = RestartPolicy()
    policy.became_ready(0.0)
    assert policy.exited(CRASH, 0.1) == RestartAt(0.1)
    assert pauses_of_failures(policy, 2) == pytest.approx([0.1, 0.2])
    policy.became_ready(9.0)
    assert policy.exited(CRASH, 9.0) == RestartAt(9.4)


def test_failed_starts_are_spaced_out_up_to_ten_seconds():
    """0.1 s, doubling, and never more than 10 s, however long it goes on."""
    pauses = pauses_of_failures(RestartPolicy(), 10)
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10, 10])


def test_becoming_ready_forgets_the_failures():
    policy = RestartPolicy()
    pauses_of_failures(policy, 5)
    policy.became_ready(45.0)
    assert policy.exited(CRASH, 50.0) == RestartAt(50.0)
    assert pauses_of_failures(policy, 2) == pytest.approx([0.1, 0.2])


@pytest.mark.parametrize("exit_code", [2, 3, 4, 5, 64, 78])
def test_an_error_that_stays_is_given_up_before_the_first_success(exit_code):
    assert RestartPolicy().exited(exit_code, 0.0) == GiveUp()


@pytest.mark.parametrize("exit_code", [0, 1, 6, 63, 79, 130, KILLED])
def test_other_ends_are_tried_again(exit_code):
    assert RestartPolicy().exited(exit_code, 0.0) == RestartAt(0.1)


def test_what_has_worked_is_never_given_up():
    policy = RestartPolicy()
    policy.became_ready(0.0)
    policy.exited(KILLED, 2.0)
    assert policy.exited(78, 2.0) == RestartAt(2.1)


# Exit codes


@pytest.mark.parametrize("code", list(ExitCode), ids=lambda code: code.name)
def test_what_is_final_is_said_where_it_counts(code):
    assert (code in FINAL_EXIT_CODES) is (code in FINAL)
    first, later = RestartPolicy(), RestartPolicy()
    later.became_ready(0.0)
    ends_first_start = code in FINAL | {ExitCode.PORT, ExitCode.FETCH}
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

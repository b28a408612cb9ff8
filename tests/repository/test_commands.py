"""The Makefile and .ci/run: what a newcomer and continuous integration type."""

import shlex
import shutil
import subprocess
import sys

import pytest

from repository_checks.programs import run
from repository_checks.sources import ROOT

pytestmark = pytest.mark.lint


def make(*arguments, cwd=ROOT):
    """A finished run of make that inherits no flags from a make around the tests."""
    return subprocess.run(
        ["env", "-u", "MAKEFLAGS", "-u", "MAKELEVEL", "make", *arguments],
        cwd=cwd,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )


def python_that_says(version, folder):
    """An interpreter that takes itself for another version."""
    program = folder / "python"
    program.write_text(
        f'#!/bin/sh\nexec {sys.executable} -c "import sys; sys.version_info = {version}; '
        f'sys.version = \'.\'.join(map(str, {version})); exec(sys.argv[1])" "$2"\n'
    )
    program.chmod(0o755)
    return program


@pytest.fixture
def checkout(tmp_path):
    """A checkout without an environment."""
    for name in ("Makefile", "pyproject.toml", "protos/pyproject.toml", "clients/pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_make_alone_shows_the_commands():
    shown = make().stdout
    assert "make demo " in shown
    assert "make test " in shown


@pytest.mark.parametrize("version", [(3, 10, 13), (3, 14, 0)])
def test_an_unsupported_python_is_refused_in_one_line(checkout, tmp_path_factory, version):
    python = python_that_says(version, tmp_path_factory.mktemp("python"))
    result = make("demo", f"PYTHON={python}", cwd=checkout)
    message = result.stdout.splitlines()[0]
    assert result.returncode != 0
    assert message.startswith("Paceline needs Python 3.11 to 3.13")
    assert ".".join(map(str, version)) in message
    assert "make PYTHON=" in message


def test_a_missing_python_is_refused_in_one_line(checkout):
    result = make("test", "PYTHON=/nowhere/python3", cwd=checkout)
    assert result.returncode != 0
    assert "'/nowhere/python3' is not there" in result.stdout.splitlines()[0]


@pytest.mark.parametrize("changed", ["pyproject.toml", "protos/pyproject.toml", "clients/pyproject.toml"])
def test_a_second_run_installs_nothing_and_a_changed_pyproject_does(checkout, changed):
    stamps = [checkout / ".venv" / name for name in (".created", ".run", ".dev")]
    stamps[0].parent.mkdir()
    for stamp in stamps:
        stamp.touch()
    assert "pip install" not in make("--dry-run", "test", cwd=checkout).stdout
    newer = stamps[-1].stat().st_mtime_ns + 10**9
    subprocess.run(["touch", "-d", f"@{newer / 10**9}", str(checkout / changed)], check=True)
    assert make("--dry-run", "test", cwd=checkout).stdout.count("pip install") == 2


@pytest.mark.slow
def test_make_soak_finds_the_long_variants_and_the_random_searches(checkout):
    python, *arguments = shlex.split(make("--dry-run", "soak", cwd=checkout).stdout.splitlines()[-1])
    files = ("executor/models/test_real_model.py", "executor/rows/test_properties.py", "scheduler/core/test_blocks.py")

    listed = run(
        "python", *arguments, "--collect-only", "-q", "-p", "no:cacheprovider", *(f"tests/{file}" for file in files)
    ).stdout

    assert python == ".venv/bin/python"
    for variation in ("chunks_do_not", "batch_mates_do_not", "prefix_hits_do_not", "a_seeded_request_draws"):
        for first in range(5):
            assert f"test_{variation}" in listed
            assert f"[ten of all, from {first}" in listed
    assert "test_a_plan_is_applied_wholly_or_not_at_all" in listed
    assert "test_any_sound_schedule_gives_every_request_its_own_tokens" in listed
    assert "TestBlockPool::runTest" in listed
    assert "test_greedy_tokens_equal" not in listed


def test_ci_runs_all_tests(tmp_path):
    recorder = tmp_path / "make"
    recorder.write_text('#!/bin/sh\necho "make $* in $PWD, stdin $(wc -c)"\n')
    recorder.chmod(0o755)
    result = subprocess.run(
        [str(ROOT / ".ci" / "run")],
        cwd="/",
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        input="typed",
        text=True,
        capture_output=True,
        check=True,
    )
    assert result.stdout.split() == ["make", "test-all", "in", f"{ROOT},", "stdin", "0"]

"""ruff, mypy and import-linter accept the tree, and each of them would refuse a worse one."""

import json
import os
import shutil
import sysconfig
import tomllib

import pytest

from repository_checks.programs import BIN, run
from repository_checks.sources import PACKAGES, ROOT

pytestmark = pytest.mark.lint

# For every contract of pyproject.toml, by its id, a module that breaks it and what it holds.
BREACHES = {
    "scheduler-alone": ("scheduler/paceline_scheduler/breach.py", "import torch"),
    "executor-alone": ("executor/paceline_executor/breach.py", "import paceline_client"),
    "kernels-alone": ("kernels/paceline_kernels/breach.py", "import grpc"),
    "client-alone": ("clients/paceline_client/breach.py", "import numpy"),
    "cli-alone": ("clients/paceline_cli/breach.py", "import paceline_executor"),
    "gateway-alone": ("clients/paceline_gateway/breach.py", "import paceline_cli.client"),
    "cli-layers": ("clients/paceline_cli/top/breach.py", "import paceline_cli.commands.top"),
    "process-alone": ("protos/paceline/process/breach.py", "import paceline.v1.plan_pb2"),
    "plan-alone": ("protos/paceline/plan/breach.py", "import structlog"),
    "forms-alone": ("protos/paceline/forms/breach.py", "import numpy"),
    "forms-uncompiled": ("protos/paceline/forms/grammar.py", "import llguidance"),
    "plan-values-plain": ("protos/paceline/plan/hashes.py", "import paceline.v1.plan_pb2"),
    "messages-at-the-border": (
        "scheduler/paceline_scheduler/core/queue/breach.py",
        "def f():\n    from paceline.v1 import plan_pb2",
    ),
    "no-circles": ("executor/paceline_executor/rows/batch.py", "import paceline_executor.rows.table"),
    "core-pure": ("scheduler/paceline_scheduler/core/breach.py", "import time"),
    "leadership-pure": ("scheduler/paceline_scheduler/link/redial.py", "import asyncio"),
    "scheduler-layers": ("scheduler/paceline_scheduler/link/breach.py", "import paceline_scheduler.api"),
    "core-layers": (
        "scheduler/paceline_scheduler/core/planning/breach.py",
        "import paceline_scheduler.core.executor.state",
    ),
    "executor-layers": ("executor/paceline_executor/models/breach.py", "import paceline_executor.link"),
    "kernels-layers": ("kernels/paceline_kernels/vector/breach.py", "import paceline_kernels.sampling"),
}


# A line each that the product may not have.
BANNED = """
os.environ["A"]
os.getenv("A")
o.environ.get("A")
from os import environ
import pickle
from pickle import loads
from torch import load
import torch.hub
torch.load("x")
t.jit.load("x")
import builtins
importlib.import_module("x")
"""


def run_ruff(*arguments, stdin=""):
    """ruff with the repository's configuration, wherever the file lies."""
    return run("ruff", *arguments, "--config", ROOT / "pyproject.toml", stdin=stdin)


def refused_lines(path, text):
    """The lines of a made-up file that ruff refuses for what they call or import."""
    shown = run_ruff("check", "--output-format", "json", "--stdin-filename", ROOT / path, "-", stdin=text).stdout
    return {found["location"]["row"] for found in json.loads(shown) if found["code"] == "TID251"}


def test_ruff_finds_nothing():
    result = run_ruff("check", "--quiet", "--output-format", "concise", ROOT)
    assert result.returncode == 0, result.stdout


def test_ruff_would_format_nothing():
    result = run_ruff("format", "--check", "--quiet", ROOT)
    assert result.returncode == 0, result.stdout


def test_ruff_refuses_an_unused_import_and_bad_formatting(tmp_path):
    worse = tmp_path / "worse.py"
    worse.write_text('"""A module."""\nimport os\nx = {  "a":1 }\n')
    assert "F401" in run_ruff("check", worse).stdout
    assert run_ruff("format", "--check", worse).returncode == 1


def test_ruff_refuses_what_reads_the_environment_or_runs_code_out_of_data():
    imports = "import importlib, os, os as o, torch, torch as t"
    lines = set(range(2, 2 + len(BANNED.split("\n")[1:-1])))
    assert refused_lines("scheduler/paceline_scheduler/core/planner.py", imports + BANNED) == lines
    assert refused_lines("scheduler/paceline_scheduler/core/planner.py", "model.eval()\nself.load('x')\n") == set()


def test_ruff_lets_the_configuration_read_the_environment():
    assert refused_lines("scheduler/paceline_scheduler/config.py", "import os\nos.environ['A']\n") == set()


def test_mypy_finds_nothing():
    result = run("mypy", "--no-error-summary")
    assert result.returncode == 0, result.stdout


def test_mypy_refuses_an_untyped_function(tmp_path):
    worse = tmp_path / "worse.py"
    worse.write_text("def double(x):\n    return x + x\n")
    result = run("mypy", "--config-file", ROOT / "pyproject.toml", worse)
    assert "Function is missing a type annotation" in result.stdout


def test_the_import_contracts_are_kept():
    result = run("lint-imports", "--no-logo", "--no-cache")
    assert result.returncode == 0, result.stdout


def test_every_import_contract_can_be_broken(tmp_path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in PACKAGES:
        shutil.copytree(package, tmp_path / package.relative_to(ROOT), ignore=shutil.ignore_patterns("__pycache__"))
    for path, text in BREACHES.values():
        (tmp_path / path).write_text(f"{text}\n")
    copies = [tmp_path / package.relative_to(ROOT).parent for package in PACKAGES]
    search_path = os.pathsep.join(map(str, (*copies, sysconfig.get_path("purelib"))))

    # -S leaves out the checkout itself, whose namespace package `paceline` would be joined to the copy's.
    command = ("-S", BIN / "lint-imports", "--no-logo", "--no-cache")
    result = run("python", *command, cwd=tmp_path, environment={"PYTHONPATH": search_path})

    assert f"Contracts: 0 kept, {len(BREACHES)} broken." in result.stdout


def test_every_import_contract_has_its_breach():
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert [contract["id"] for contract in configuration["tool"]["importlinter"]["contracts"]] == list(BREACHES)

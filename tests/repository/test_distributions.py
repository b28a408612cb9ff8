"""What can be installed from this checkout: stubs alone, the client library alone, and everything."""

import configparser
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

from repository_checks.sources import ROOT

pytestmark = pytest.mark.lint

FOLDERS = {"paceline_protos": "protos", "paceline_client": "clients", "paceline": "."}
SITE_PACKAGES = sysconfig.get_path("purelib")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """The wheel of each distribution, built from the checkout."""
    folder = tmp_path_factory.mktemp("wheels")
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", folder, *(ROOT / name for name in FOLDERS.values()))
    return {wheel.name.split("-")[0]: wheel for wheel in folder.glob("*.whl")}


def pip(*arguments):
    """Run pip without a registry."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *map(str, arguments)]
    subprocess.run(command, check=True, env={"PIP_NO_INDEX": "1", "PATH": "/usr/bin:/bin"})


def files_of(wheel):
    """The files that the wheel installs, without what describes it."""
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def run_beside(folder, program):
    """Run a program where this folder and the libraries are importable, and nothing of this checkout is."""
    code = f"import sys; sys.path[:0] = [{str(folder)!r}, {SITE_PACKAGES!r}]\n{program}"
    return subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)


def installed(folder: Path, *wheels):
    pip("install", "--no-deps", "--target", folder, *wheels)
    return folder


@pytest.mark.slow
def test_the_stubs_alone_make_a_call(wheels, tmp_path):
    assert {Path(name).parent for name in files_of(wheels["paceline_protos"])} == {Path("paceline/v1")}
    assert "paceline/v1/py.typed" in files_of(wheels["paceline_protos"])
    folder = installed(tmp_path, wheels["paceline_protos"])
    called = run_beside(
        folder,
        "import grpc\n"
        "from paceline.v1 import inference_pb2, inference_pb2_grpc\n"
        "stub = inference_pb2_grpc.InferenceServiceStub(grpc.insecure_channel('127.0.0.1:1'))\n"
        "try: stub.ListModels(inference_pb2.ListModelsRequest(), timeout=5)\n"
        "except grpc.RpcError as error: print(error.code().name)\n",
    )
    assert (called.stdout, called.returncode) == ("UNAVAILABLE\n", 0), called.stderr
    assert "No module named 'paceline_client'" in run_beside(folder, "import paceline_client").stderr


@pytest.mark.slow
def test_the_client_library_needs_the_stubs_and_no_program(wheels, tmp_path):
    names = files_of(wheels["paceline_client"])
    assert {name.split("/")[0] for name in names} == {"paceline_client"}
    assert "paceline_client/py.typed" in names
    assert not scripts_of(wheels["paceline_client"])
    folder = installed(tmp_path, wheels["paceline_client"], wheels["paceline_protos"])
    refused = run_beside(
        folder,
        "from paceline_client import Client, UnavailableError\n"
        "try:\n"
        "  with Client('127.0.0.1:1') as client: client.list_models()\n"
        "except UnavailableError: print('refused')\n",
    )
    assert (refused.stdout, refused.returncode) == ("refused\n", 0), refused.stderr
    assert "No module named 'paceline_cli'" in run_beside(folder, "import paceline_cli").stderr


@pytest.mark.slow
def test_no_two_distributions_bring_the_same_file(wheels):
    owners = [name for wheel in wheels.values() for name in files_of(wheel)]
    assert len(owners) == len(set(owners))
    assert scripts_of(wheels["paceline"]) == {"paceline", "paceline-scheduler", "paceline-executor", "paceline-gateway"}


@pytest.mark.slow
def test_a_program_without_its_extra_says_what_to_install(wheels, tmp_path):
    folder = installed(tmp_path, *wheels.values())
    for program, arguments in (
        ("scheduler", "--executors localhost:1"),
        ("executor", "--model some"),
        ("gateway", ""),
    ):
        without = f"import sys; sys.modules['structlog'] = None; sys.argv[1:] = {arguments.split()}"
        ended = run_beside(folder, f"{without}\nfrom paceline_{program}.__main__ import main; main()")
        assert ended.stderr == (
            f"paceline-{program}: error: structlog not installed: in the checkout, "
            f"pip install ./protos ./clients '.[{program}]'\n"
        )
        assert ended.returncode == 2


def test_all_distributions_have_one_version():
    tables = [tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"] for folder in FOLDERS.values()]
    (version,) = {table["version"] for table in tables}
    needed = [need for table in tables for need in table["dependencies"] if need.startswith("paceline-")]
    assert sorted(needed) == [f"paceline-client=={version}", f"paceline-protos=={version}"]


def scripts_of(wheel):
    archive = zipfile.ZipFile(wheel)
    entry_points = configparser.ConfigParser()
    for name in archive.namelist():
        if name.endswith("entry_points.txt"):
            entry_points.read_string(archive.read(name).decode())
    return set(entry_points["console_scripts"]) if entry_points.has_section("console_scripts") else set()

"""The protos are clean, compatible with the last release, and the committed modules are what they generate."""

import shutil

import pytest

from repository_checks.generate import FOLDER, generate, generated_files
from repository_checks.programs import run
from repository_checks.sources import PROTOS

pytestmark = pytest.mark.lint

RELEASED = PROTOS / "released.binpb"


@pytest.fixture
def copy(tmp_path):
    """The protos and their configuration, to be spoilt."""
    shutil.copytree(PROTOS, tmp_path, ignore=shutil.ignore_patterns("*.py*"), dirs_exist_ok=True)
    return tmp_path


def edit(copy, name, old, new):
    """Replace a piece of text that occurs in a copied proto."""
    path = copy / FOLDER / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_buf_lint_finds_nothing():
    """STANDARD and COMMENTS hold: every message, field, value and call has a sentence."""
    result = run("buf", "lint", PROTOS)
    assert result.returncode == 0, result.stdout


def test_buf_would_format_nothing():
    """The protos are formatted."""
    result = run("buf", "format", "--diff", "--exit-code", PROTOS)
    assert result.returncode == 0, result.stdout


def test_the_protos_break_nothing_that_was_released():
    """Field numbers, names and types of the last release still stand."""
    result = run("buf", "breaking", PROTOS, "--against", RELEASED)
    assert result.returncode == 0, result.stdout


def test_the_committed_modules_are_what_the_protos_generate(tmp_path):
    """`make protos` would change nothing."""
    generate(PROTOS, tmp_path)
    assert generated_files(tmp_path / FOLDER) == generated_files(PROTOS / FOLDER)


def test_a_field_without_a_comment_is_refused(copy):
    """COMMENTS is switched on."""
    edit(copy, "plan.proto", "message StepTimings {", "message StepTimings {\n  uint64 nap_ns = 99;")
    assert 'Field "nap_ns" should have a non-empty comment' in run("buf", "lint", copy).stdout


def test_bad_formatting_is_refused(copy):
    """`buf format` looks at what it is given."""
    edit(copy, "plan.proto", "uint64 prepare_ns = 2;", "uint64   prepare_ns=2;")
    assert run("buf", "format", "--diff", "--exit-code", copy).returncode != 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("uint64 prepare_ns = 2;", "uint32 prepare_ns = 2;", 'changed type from "uint64" to "uint32"'),
        ("uint64 prepare_ns = 2;", "uint64 prepare_ns = 99;", 'Previously present field "2"'),
        ("uint64 prepare_ns = 2;", "uint64 preparation_ns = 2;", 'changed name from "prepare_ns"'),
    ],
    ids=["type", "number", "name"],
)
def test_a_breaking_change_is_refused(copy, old, new, message):
    """A field that was released keeps its type, its number and its name."""
    edit(copy, "plan.proto", old, new)
    result = run("buf", "breaking", copy, "--against", RELEASED)
    assert message in result.stdout


def test_a_changed_proto_generates_other_modules(copy, tmp_path_factory):
    """The comparison with a fresh generation sees a change of one field."""
    edit(copy, "plan.proto", "uint64 prepare_ns = 2;", "uint64 preparation_ns = 2;")
    fresh = tmp_path_factory.mktemp("fresh")
    generate(copy, fresh)
    assert generated_files(fresh / FOLDER) != generated_files(PROTOS / FOLDER)

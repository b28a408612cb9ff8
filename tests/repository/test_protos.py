"""The protos are clean, compatible with the last release, and the committed files are what they generate."""

import re
import shlex
import shutil
import sys

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from repository_checks.generate import DESCRIPTORS, FOLDER, generate, generated_files
from repository_checks.programs import run
from repository_checks.sources import PROTOS

pytestmark = pytest.mark.lint

RELEASED = PROTOS / "released.binpb"
README = (PROTOS / "README.md").read_text(encoding="utf-8")
# A compiler's plugin that generates a file per proto, with the package that the language gives it.
PLUGIN = """#!{python}
import sys
from google.protobuf.compiler.plugin_pb2 import CodeGeneratorRequest, CodeGeneratorResponse

asked = CodeGeneratorRequest.FromString(sys.stdin.buffer.read())
response = CodeGeneratorResponse(supported_features=CodeGeneratorResponse.FEATURE_PROTO3_OPTIONAL)
for proto in asked.proto_file:
    if proto.name in asked.file_to_generate:
        content = f"{{proto.options.go_package}} {{proto.options.java_package}} {{proto.options.java_multiple_files}}"
        response.file.add(name=f"{{proto.name}}.{name}", content=content)
sys.stdout.buffer.write(response.SerializeToString())
"""


@pytest.fixture(scope="module")
def descriptors():
    """What is published for other languages."""
    return FileDescriptorSet.FromString((PROTOS / DESCRIPTORS).read_bytes())


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


@pytest.mark.parametrize(
    "arguments",
    [("lint", PROTOS), ("format", "--diff", "--exit-code", PROTOS), ("breaking", PROTOS, "--against", RELEASED)],
    ids=lambda arguments: arguments[0],
)
def test_buf_finds_nothing(arguments):
    result = run("buf", *arguments)
    assert result.returncode == 0, result.stdout


def test_the_committed_files_are_what_the_protos_generate(tmp_path):
    generate(PROTOS, tmp_path)
    assert generated_files(tmp_path / FOLDER) == generated_files(PROTOS / FOLDER)


def test_the_descriptor_set_is_whole(descriptors):
    names = [file.name for file in descriptors.file]
    assert {str(path.relative_to(PROTOS)) for path in (PROTOS / FOLDER).glob("*.proto")} < set(names)
    for index, file in enumerate(descriptors.file):
        assert set(file.dependency) <= set(names[:index])
        assert any(location.leading_comments for location in file.source_code_info.location)


@pytest.mark.slow
@pytest.mark.parametrize("command", re.findall("^protoc .*$", README, flags=re.MULTILINE))
def test_stubs_for_other_languages_are_made_as_the_readme_says(command, tmp_path):
    """With plugins that only look at what they are given."""
    compiler, *arguments = shlex.split(command)
    outputs = dict(re.findall(r"--([\w-]+)_out=(\S+)", command))
    assert (compiler, len(outputs)) == ("protoc", 2)
    for name, folder in outputs.items():
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        plugin = tmp_path / f"protoc-gen-{name}"
        plugin.write_text(PLUGIN.format(python=sys.executable, name=name))
        plugin.chmod(0o755)
        arguments.append(f"--plugin=protoc-gen-{name}={plugin}")
    shutil.copy(PROTOS / DESCRIPTORS, tmp_path)

    result = run("python", "-m", "grpc_tools.protoc", *arguments, cwd=tmp_path)

    assert result.returncode == 0, result.stdout
    for name, folder in outputs.items():
        for proto in ("inference", "sampling"):
            made = tmp_path / folder / f"paceline/v1/{proto}.proto.{name}"
            assert made.read_text() == "paceline/v1;pacelinev1 com.paceline.v1 True"


def not_acted_on(descriptors):
    """The fields whose comment says so, as `Message.field`."""
    says_so = re.compile(r"(?:Not supported|Never set|Not set|Always \w+) yet")
    for file in descriptors.file:
        for location in file.source_code_info.location:
            match list(location.path):
                case [4, message, 2, field] if says_so.search(" ".join(location.leading_comments.split())):
                    of = file.message_type[message]
                    yield f"{of.name}.{of.field[field].name}"


def test_the_readme_names_every_field_that_is_not_acted_on_yet(descriptors):
    section = README.partition("## Not acted on yet")[2].partition("\n## ")[0]
    named = re.findall(r"`([A-Z]\w+\.\w+)`", section)
    assert sorted(named) == sorted(not_acted_on(descriptors))


@pytest.mark.slow
def test_a_field_without_a_comment_is_refused(copy):
    edit(copy, "plan.proto", "message StepTimings {", "message StepTimings {\n  uint64 nap_ns = 99;")
    assert 'Field "nap_ns" should have a non-empty comment' in run("buf", "lint", copy).stdout


@pytest.mark.slow
def test_bad_formatting_is_refused(copy):
    edit(copy, "plan.proto", "uint64 prepare_ns = 2;", "uint64   prepare_ns=2;")
    assert run("buf", "format", "--diff", "--exit-code", copy).returncode != 0


@pytest.mark.slow
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
    edit(copy, "plan.proto", old, new)
    result = run("buf", "breaking", copy, "--against", RELEASED)
    assert message in result.stdout


@pytest.mark.slow
def test_a_changed_proto_generates_other_modules(copy, tmp_path_factory):
    edit(copy, "plan.proto", "uint64 prepare_ns = 2;", "uint64 preparation_ns = 2;")
    fresh = tmp_path_factory.mktemp("fresh")
    generate(copy, fresh)
    assert generated_files(fresh / FOLDER) != generated_files(PROTOS / FOLDER)
